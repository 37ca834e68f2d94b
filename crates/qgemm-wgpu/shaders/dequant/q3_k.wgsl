// Q3_K: 12 bytes of 6-bit scales; f16 d.
// Eight bytes hold low nibbles, four the upper two bits.

fn sub_scale(rows: Rows, sub: u32) -> Affine {
    let low = (record_u8(rows, PLANE_SCALES, sub % 8u) >> vec4<u32>(sub / 8u * 4u)) & vec4<u32>(15u);
    let high = (record_u8(rows, PLANE_SCALES, 8u + sub % 4u) >> vec4<u32>(sub / 4u * 2u)) & vec4<u32>(3u);
    let scale = vec4<f32>(low | (high << vec4<u32>(4u))) - vec4<f32>(32.0);
    return offset_scale(record_f16(rows, PLANE_D, 0u) * scale, vec4<f32>(OFFSET));
}
