// MXFP8 of E5M2 numbers: an E8M0 exponent.

fn sub_scale(rows: Rows, sub: u32) -> Affine {
    return e8m0(record_u8(rows, PLANE_D, sub));
}
