// Stores to D. f32 has one element a word, f16 and bf16 two.

@group(0) @binding(8) var<storage, read_write> d: array<atomic<u32>>;

// Stores the first `count` values from `feature`
// on in row m of D.
// A plain store of a 16-bit word needs both elements.
// Otherwise the other half belongs to another invocation or
// lies outside D, and must keep its bits.
fn store4(m: u32, feature: u32, count: u32, four_values: vec4<f32>) {
    var v = four_values;
    let first = d_first() + m * p.d_row + feature;
    if (d_dtype() == F32) {
        for (var i = 0u; i < count; i++) {
            atomicStore(&d[first + i], bitcast<u32>(v[i]));
        }
        return;
    }
    if (count == 4u && (first & 1u) == 0u) {
        atomicStore(&d[first >> 1u], to_half(v.x) | (to_half(v.y) << 16u));
        atomicStore(&d[(first >> 1u) + 1u], to_half(v.z) | (to_half(v.w) << 16u));
        return;
    }
    var i = 0u;
    while (i < count) {
        let index = first + i;
        let bits = to_half(v[i]);
        if ((index & 1u) == 0u && i + 1u < count) {
            atomicStore(&d[index >> 1u], bits | (to_half(v[i + 1u]) << 16u));
            i += 2u;
        } else {
            let shift = (index & 1u) * 16u;
            atomicAnd(&d[index >> 1u], ~(0xffffu << shift));
            atomicOr(&d[index >> 1u], bits << shift);
            i += 1u;
        }
    }
}
