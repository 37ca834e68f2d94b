// MXFP4: E8M0 scale, halved because the codebook holds
// doubled FP4 values.

fn sub_scale(rows: Rows, sub: u32) -> Affine {
    return half_e8m0(record_u8(rows, PLANE_D, sub));
}
