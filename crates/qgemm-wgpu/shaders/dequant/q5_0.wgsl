// Q5_0: f16 d, a word of fifth bits, 16 bytes of nibbles.

fn dequant8(block: u32, first: u32) -> Eight {
    let fifth = spread_bits(w_u8(block + 2u + first / 8u));
    return offset8(join(nibbles32(block + 6u, first), fifth, 4u), OFFSET, w_f16(block));
}
