// Q4_0: f16 d, 16 bytes of nibbles.

fn dequant8(block: u32, first: u32) -> Eight {
    return offset8(nibbles32(block + 2u, first), OFFSET, w_f16(block));
}
