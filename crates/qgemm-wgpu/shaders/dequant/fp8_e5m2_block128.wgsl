// 128 codes of FP8 E5M2, then an f32 scale.

fn dequant8(block: u32, first: u32) -> Eight {
    return scale8(e5m2_8(block + first), bitcast<f32>(w_u32(block + 128u)));
}
