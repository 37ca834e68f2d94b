// D in f32.

@group(0) @binding(8) var<storage, read_write> d: array<f32>;

// Finishes and stores what four sums that begin at `position` make of row m of D.
fn store4(m: u32, position: u32, sums: vec4<f32>) {
    let out = outputs(m, position, sums);
    var v = out.values;
    let first = p.d_base + m * p.d_row + out.feature;
    for (var i = 0u; i < out.count; i++) {
        d[first + i] = v[i];
    }
}
