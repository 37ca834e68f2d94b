// 3-bit codes in order (eight fill three bytes), then f16 scale and zero point.

fn spread_triples(bits: u32) -> u32 {
    return (bits & 7u) | ((bits & 0x38u) << 5u) | ((bits & 0x1c0u) << 10u) | ((bits & 0xe00u) << 15u);
}

fn dequant8(block: u32, first: u32) -> Eight {
    let bits = w_u32(block + first / 8u * 3u);
    return zero_point8(Codes(spread_triples(bits), spread_triples(bits >> 12u)), block);
}
