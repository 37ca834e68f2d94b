// Q2_K: 16 bytes of scales (low nibble) and minima (high nibble), 64 bytes of codes, f16 d, f16 dmin. Of each
// 128 values, byte l of 32 holds values l, l + 32, l + 64 and l + 96.

fn dequant8(block: u32, first: u32) -> Eight {
    let half = first / 128u;
    let codes = bit_field(block + 16u + half * 32u + first % 32u, (first % 128u) / 32u * 2u, 0x03030303u);
    let sub = w_u8(block + first / 16u);
    let scale = w_f16(block + 80u) * f32(sub & 15u);
    return affine8(codes, scale, w_f16(block + 82u) * f32(sub >> 4u));
}
