// D with rows of whole 16-byte vectors.

@group(0) @binding(8) var<storage, read_write> d: array<vec4<u32>>;

// Stores eight values of a row from column `s` on.
fn store_eight(row: u32, s: u32, lo: vec4<f32>, hi: vec4<f32>) {
    let first = d_first() + row * p.d_row + s;
    if (d_dtype() == F32) {
        d[first / 4u] = bitcast<vec4<u32>>(lo);
        d[first / 4u + 1u] = bitcast<vec4<u32>>(hi);
        return;
    }
    d[first / 8u] = vec4<u32>(pair(lo.x, lo.y), pair(lo.z, lo.w), pair(hi.x, hi.y), pair(hi.z, hi.w));
}

fn pair(low: f32, high: f32) -> u32 {
    return to_half(low) | (to_half(high) << 16u);
}
