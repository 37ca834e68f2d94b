// FP8 E5M2; the scale belongs to the row.

fn dequant8(block: u32, first: u32) -> Eight {
    return e5m2_8(block + first);
}
