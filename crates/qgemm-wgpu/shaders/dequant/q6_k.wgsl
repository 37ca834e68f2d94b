// Q6_K: 128 bytes of low nibbles, 64 of upper bit pairs, 16 signed scales, f16 d. Of each 128 values, nibble byte
// l of 64 holds value l below value l + 64; pair byte l of 32 holds values l, l + 32, l + 64 and l + 96.

fn dequant8(block: u32, first: u32) -> Eight {
    let half = first / 128u;
    let low = bit_field(block + half * 64u + first % 64u, (first % 128u) / 64u * 4u, 0x0f0f0f0fu);
    let high = bit_field(block + 128u + half * 32u + first % 32u, (first % 128u) / 32u * 2u, 0x03030303u);
    let scale = bitcast<i32>(w_u8(block + 192u + first / 16u) << 24u) >> 24u;
    return offset8(join(low, high, 4u), OFFSET, w_f16(block + 208u) * f32(scale));
}
