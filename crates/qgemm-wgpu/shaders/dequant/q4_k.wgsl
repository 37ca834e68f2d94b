// Q4_K: f16 d and dmin.
// Then 12 bytes of 6-bit scales and minimums.

fn sub_scale(rows: Rows, sub: u32) -> Affine {
    return k_scale_min(rows, PLANE_SCALES, sub);
}
