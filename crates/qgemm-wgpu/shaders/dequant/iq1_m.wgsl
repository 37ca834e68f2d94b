// IQ1_M: nibbles s, which mean 2 s + 1.
// f16 d.

fn sub_scale(rows: Rows, sub: u32) -> Affine {
    let s = (record_u8(rows, PLANE_SCALES, sub / 2u) >> vec4<u32>(sub % 2u * 4u)) & vec4<u32>(15u);
    let scale = vec4<f32>(s * vec4<u32>(2u) + vec4<u32>(1u)) * vec4<f32>(0.125);
    return scale_alone(record_f16(rows, PLANE_D, 0u) * scale);
}
