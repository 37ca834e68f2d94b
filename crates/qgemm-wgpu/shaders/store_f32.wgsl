// D in f32.

@group(0) @binding(6) var<storage, read_write> d: array<f32>;

// Finishes and stores D[m, n .. n + 4], as far as N reaches.
fn store4(m: u32, n: u32, sums: vec4<f32>) {
    var v = sums;
    let first = p.d_base + m * p.d_row + n;
    for (var i = 0u; i < min(4u, p.shape.n - n); i++) {
        d[first + i] = finish(m, n + i, v[i]);
    }
}
