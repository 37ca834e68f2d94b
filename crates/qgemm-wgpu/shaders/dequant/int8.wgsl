// 8-bit codes, then f16 scale and zero point.

fn dequant8(block: u32, first: u32) -> Eight {
    return zero_point8(Codes(w_u32(block + first), w_u32(block + first + 4u)), block);
}
