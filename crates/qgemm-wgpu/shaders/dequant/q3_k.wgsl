// Q3_K: 32 bytes of high bits, 64 of low bits (as Q2_K), 12 of 6-bit scales, f16 d. Bit i / 32 of high byte
// i % 32 belongs to value i.

fn sub_scale(scales: u32, sub: u32) -> f32 {
    let low = (w_u8(scales + sub % 8u) >> (sub / 8u * 4u)) & 15u;
    let high = (w_u8(scales + 8u + sub % 4u) >> (sub / 4u * 2u)) & 3u;
    return f32(low | (high << 4u)) - 32.0;
}

fn dequant8(block: u32, first: u32) -> Eight {
    let high = bit_field(block + first % 32u, first / 32u, 0x01010101u);
    let at = block + 32u + first / 128u * 32u + first % 32u;
    let codes = join(bit_field(at, (first % 128u) / 32u * 2u, 0x03030303u), high, 2u);
    return offset8(codes, OFFSET, w_f16(block + 108u) * sub_scale(block + 96u, first / 16u));
}
