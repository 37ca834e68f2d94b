// Q6_K: 16 s8 scales, f16 d.

fn sub_scale(rows: Rows, sub: u32) -> Affine {
    let bytes = record_u8(rows, PLANE_SCALES, sub) << vec4<u32>(24u);
    let scale = vec4<f32>(bitcast<vec4<i32>>(bytes) >> vec4<u32>(24u));
    return offset_scale(record_f16(rows, PLANE_D, 0u) * scale, vec4<f32>(OFFSET));
}
