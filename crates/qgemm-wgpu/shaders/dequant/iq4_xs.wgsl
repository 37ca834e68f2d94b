// IQ4_XS: f16 d, the upper two bits of eight scales, then four
// bytes of their low nibbles.

fn sub_scale(rows: Rows, sub: u32) -> Affine {
    let low = (record_u8(rows, PLANE_SCALES, 4u + sub / 2u) >> vec4<u32>(sub % 2u * 4u)) & vec4<u32>(15u);
    let high = (record_bits(rows, PLANE_SCALES, 2u) >> vec4<u32>(sub * 2u)) & vec4<u32>(3u);
    let scale = vec4<f32>(low | (high << vec4<u32>(4u))) - vec4<f32>(32.0);
    return scale_alone(record_f16(rows, PLANE_SCALES, 0u) * scale);
}
