// IQ1_S: nibbles with a 3-bit scale s, 2 s +
// 1, and a bit that makes the minimum 9/8 of
// the scale instead of 7/8; f16 d.

fn sub_scale(rows: Rows, sub: u32) -> Affine {
    let nibble = (record_u8(rows, PLANE_SCALES, sub / 2u) >> vec4<u32>(sub % 2u * 4u)) & vec4<u32>(15u);
    let odd = (nibble & vec4<u32>(7u)) * vec4<u32>(2u) + vec4<u32>(1u);
    let scale = record_f16(rows, PLANE_D, 0u) * vec4<f32>(odd);
    return Affine(scale, -scale * select(vec4<f32>(0.875), vec4<f32>(1.125), nibble > vec4<u32>(7u)));
}
