// INT8 + 128, with per-row scales.

fn sub_scale(rows: Rows, sub: u32) -> Affine {
    return offset_scale(vec4<f32>(1.0), vec4<f32>(OFFSET));
}
