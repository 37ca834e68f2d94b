// FP8 E4M3; the scale belongs to the row.

fn dequant8(block: u32, first: u32) -> Eight {
    return e4m3_8(block + first);
}
