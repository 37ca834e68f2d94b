// Q5_K: f16 d, f16 dmin, 12 bytes of 6-bit scales and minima.

fn sub_scale(rows: Rows, sub: u32) -> Affine {
    return k_scale_min(rows, PLANE_SCALES, sub);
}
