// D in f32.

@group(0) @binding(8) var<storage, read_write> d: array<f32>;

// Stores the first `count` values from `feature` on in row m of D.
fn store4(m: u32, feature: u32, count: u32, four_values: vec4<f32>) {
    var values = four_values;
    let first = p.d_base + m * p.d_row + feature;
    if (count == 4u) {
        d[first] = values.x;
        d[first + 1u] = values.y;
        d[first + 2u] = values.z;
        d[first + 3u] = values.w;
        return;
    }
    for (var i = 0u; i < count; i++) {
        d[first + i] = values[i];
    }
}
