// MXFP4: an E8M0 exponent, which counts half because the codebook holds doubled FP4 numbers.

fn sub_scale(rows: Rows, sub: u32) -> Affine {
    return half_e8m0(record_u8(rows, PLANE_D, sub));
}
