// IQ4_NL: f16 d, 16 bytes of nibbles that select from the codebook.

fn dequant8(block: u32, first: u32) -> Eight {
    return scale8(table8(nibbles32(block + 2u, first)), w_f16(block));
}
