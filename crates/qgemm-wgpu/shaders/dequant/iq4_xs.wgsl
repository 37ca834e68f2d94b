// IQ4_XS: f16 d, a halfword with the upper two bits of eight scales, four bytes with their lower nibbles, then
// per 32 values 16 bytes of nibbles that select from the codebook.

fn dequant8(block: u32, first: u32) -> Eight {
    let sub = first / 32u;
    let low = (w_u8(block + 4u + sub / 2u) >> (sub % 2u * 4u)) & 15u;
    let high = (w_u16(block + 2u) >> (sub * 2u)) & 3u;
    let scale = w_f16(block) * (f32(low | (high << 4u)) - 32.0);
    return scale8(table8(nibbles32(block + 8u + sub * 16u, first % 32u)), scale);
}
