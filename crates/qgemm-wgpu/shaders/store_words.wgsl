// D whose rows begin and end anywhere.

// Stores what of eight values from column `s` on is in row `row` of D.
fn store_eight(row: u32, s: u32, lo: vec4<f32>, hi: vec4<f32>) {
    // In a loop, so that what stores four stands in the program once.
    for (var i = 0u; i < min(8u, p.shape.d_columns - s); i += 4u) {
        store4(row, s + i, min(4u, p.shape.d_columns - s - i), select(lo, hi, i == 4u));
    }
}
