// Q4_1: f16 d, f16 m, 16 bytes of nibbles.

fn dequant8(block: u32, first: u32) -> Eight {
    return affine8(nibbles32(block + 4u, first), w_f16(block), -w_f16(block + 2u));
}
