// 2-bit codes in order, then f16 scale and zero point.

fn spread_pairs(byte: u32) -> u32 {
    let nibbles = (byte | (byte << 12u)) & 0x000f000fu;
    return (nibbles | (nibbles << 6u)) & 0x03030303u;
}

fn dequant8(block: u32, first: u32) -> Eight {
    let bits = w_u16(block + first / 4u);
    return zero_point8(Codes(spread_pairs(bits & 0xffu), spread_pairs(bits >> 8u)), block);
}
