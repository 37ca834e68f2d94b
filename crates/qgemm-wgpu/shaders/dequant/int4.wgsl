// 4-bit codes in order, then f16 scale and zero point.

fn dequant8(block: u32, first: u32) -> Eight {
    return zero_point8(nibbles_in_order(w_u32(block + first / 2u)), block);
}
