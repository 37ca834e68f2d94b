// D with unaligned rows.

// Stores eight values from column `s` on in row
// `row`, clipped to D.
fn store_eight(row: u32, s: u32, lo: vec4<f32>, hi: vec4<f32>) {
    // A loop, to keep one copy of the code of `store4`.
    for (var i = 0u; i < min(8u, p.shape.d_columns - s); i += 4u) {
        store4(row, s + i, min(4u, p.shape.d_columns - s - i), select(lo, hi, i == 4u));
    }
}
