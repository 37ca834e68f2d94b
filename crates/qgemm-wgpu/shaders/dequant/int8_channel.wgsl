// Bytes of value + 128; the scale belongs to the row.

fn dequant8(block: u32, first: u32) -> Eight {
    return offset8(Codes(w_u32(block + first), w_u32(block + first + 4u)), OFFSET, 1.0);
}
