// Q2_K: 16 bytes of scale (low nibble) and minimum (high
// nibble); f16 d, f16 dmin.

fn sub_scale(rows: Rows, sub: u32) -> Affine {
    let nibbles = record_u8(rows, PLANE_SCALES, sub);
    return Affine(
        record_f16(rows, PLANE_D, 0u) * vec4<f32>(nibbles & vec4<u32>(15u)),
        -record_f16(rows, PLANE_D, 2u) * vec4<f32>(nibbles >> vec4<u32>(4u)),
    );
}
