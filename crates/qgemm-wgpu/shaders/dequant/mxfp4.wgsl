// MXFP4: an E8M0 exponent e, 16 bytes of nibbles that select from the codebook of doubled FP4 numbers; so the
// scale is 2^(e - 128). It is applied in two factors, since for the smallest e it is no normal f32.

fn power_of_two(biased: u32) -> f32 {
    return bitcast<f32>(biased << 23u);
}

fn dequant8(block: u32, first: u32) -> Eight {
    let exponent = w_u8(block);
    let half = exponent / 2u;
    let values = table8(nibbles32(block + 1u, first));
    return scale8(scale8(values, power_of_two(half + 63u)), power_of_two(exponent - half + 63u));
}
