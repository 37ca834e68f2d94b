// Ternary formats: f16 d.

fn sub_scale(rows: Rows, sub: u32) -> Affine {
    return offset_scale(record_f16(rows, PLANE_D, sub * 2u), vec4<f32>(OFFSET));
}
