// FP8 E4M3: f32 scale.

fn sub_scale(rows: Rows, sub: u32) -> Affine {
    return scale_alone(record_f32(rows, PLANE_D, sub * 4u));
}
