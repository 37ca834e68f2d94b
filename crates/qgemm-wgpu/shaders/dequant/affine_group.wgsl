// Affine groups: f16 d, f16 m.

fn sub_scale(rows: Rows, sub: u32) -> Affine {
    return Affine(record_f16(rows, PLANE_D, sub * 4u), record_f16(rows, PLANE_D, sub * 4u + 2u));
}
