// Q8_0: f16 d, 32 signed bytes, which become unsigned codes by flipping the sign bit.

fn dequant8(block: u32, first: u32) -> Eight {
    let at = block + 2u + first;
    let codes = Codes(w_u32(at) ^ 0x80808080u, w_u32(at + 4u) ^ 0x80808080u);
    return offset8(codes, OFFSET, w_f16(block));
}
