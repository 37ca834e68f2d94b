// Q5_K: f16 d, f16 dmin, 12 bytes of 6-bit scales and minima, 32 of fifth bits, 128 of nibbles (as Q4_K). Bit
// i / 32 of fifth-bit byte i % 32 belongs to value i.

fn dequant8(block: u32, first: u32) -> Eight {
    let at = block + 48u + first / 64u * 32u + first % 32u;
    let nibbles = bit_field(at, (first % 64u) / 32u * 4u, 0x0f0f0f0fu);
    let fifth = bit_field(block + 16u + first % 32u, first / 32u, 0x01010101u);
    let scale_min = k_scale_min(block + 4u, first / 32u);
    return affine8(join(nibbles, fifth, 4u), w_f16(block) * scale_min.x, w_f16(block + 2u) * scale_min.y);
}
