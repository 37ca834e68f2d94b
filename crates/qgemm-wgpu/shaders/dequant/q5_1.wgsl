// Q5_1: f16 d, f16 m, a word of fifth bits, 16 bytes of nibbles.

fn dequant8(block: u32, first: u32) -> Eight {
    let fifth = spread_bits(w_u8(block + 4u + first / 8u));
    return affine8(join(nibbles32(block + 8u, first), fifth, 4u), w_f16(block), -w_f16(block + 2u));
}
