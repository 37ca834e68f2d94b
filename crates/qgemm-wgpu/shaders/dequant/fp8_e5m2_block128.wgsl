// FP8 E5M2: f32 scale.

fn sub_scale(rows: Rows, sub: u32) -> Affine {
    return scale_alone(record_f32(rows, PLANE_D, sub * 4u));
}
