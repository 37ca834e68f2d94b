// MXFP8 (E5M2): E8M0 scale.

fn sub_scale(rows: Rows, sub: u32) -> Affine {
    return e8m0(record_u8(rows, PLANE_D, sub));
}
