// Q4_K: f16 d, f16 dmin, 12 bytes of 6-bit scales and minima, 128 bytes of nibbles. Of each 64 values, byte l of
// 32 holds value l below value l + 32.

fn dequant8(block: u32, first: u32) -> Eight {
    let codes = bit_field(block + 16u + first / 64u * 32u + first % 32u, (first % 64u) / 32u * 4u, 0x0f0f0f0fu);
    let scale_min = k_scale_min(block + 4u, first / 32u);
    return affine8(codes, w_f16(block) * scale_min.x, w_f16(block + 2u) * scale_min.y);
}
