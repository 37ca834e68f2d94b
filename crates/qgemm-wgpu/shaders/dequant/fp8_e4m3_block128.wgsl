// 128 codes of FP8 E4M3, then an f32 scale.

fn dequant8(block: u32, first: u32) -> Eight {
    return scale8(e4m3_8(block + first), bitcast<f32>(w_u32(block + 128u)));
}
