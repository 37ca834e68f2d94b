// Q1_0: f16 d.

fn sub_scale(rows: Rows, sub: u32) -> Affine {
    return scale_alone(record_f16(rows, PLANE_D, sub * 2u));
}
