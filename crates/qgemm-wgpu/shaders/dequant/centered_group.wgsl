// Groups around 8: f16 d, f16 m.

fn sub_scale(rows: Rows, sub: u32) -> Affine {
    let scale = record_f16(rows, PLANE_D, sub * 4u);
    return Affine(scale, record_f16(rows, PLANE_D, sub * 4u + 2u) - 8.0 * scale);
}
