// Groups of 3-bit integers: f16 scale, a byte of zero point.

fn sub_scale(rows: Rows, sub: u32) -> Affine {
    return offset_scale(record_f16(rows, PLANE_D, sub * 2u), vec4<f32>(record_u8(rows, PLANE_Z, sub)));
}
