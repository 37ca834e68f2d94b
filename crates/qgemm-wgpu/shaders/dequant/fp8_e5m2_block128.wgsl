// FP8 E5M2 with f32 block scales.

fn sub_scale(rows: Rows, sub: u32) -> Affine {
    return scale_alone(record_f32(rows, PLANE_D, sub * 4u));
}
