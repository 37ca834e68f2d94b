// D in f16 or bf16: two elements a word.

@group(0) @binding(6) var<storage, read_write> d: array<atomic<u32>>;

// Finishes and stores D[m, n .. n + 4], as far as N reaches. A word is stored whole only where both halves are
// ours; else the other half belongs to another invocation or lies outside D, and must keep its bits.
fn store4(m: u32, n: u32, sums: vec4<f32>) {
    var v = sums;
    let first = p.d_base + m * p.d_row + n;
    let count = min(4u, p.shape.n - n);
    var i = 0u;
    while (i < count) {
        let index = first + i;
        let bits = to_half(finish(m, n + i, v[i]));
        if ((index & 1u) == 0u && i + 1u < count) {
            let next = to_half(finish(m, n + i + 1u, v[i + 1u]));
            atomicStore(&d[index >> 1u], bits | (next << 16u));
            i += 2u;
        } else {
            let shift = (index & 1u) * 16u;
            atomicAnd(&d[index >> 1u], ~(0xffffu << shift));
            atomicOr(&d[index >> 1u], bits << shift);
            i += 1u;
        }
    }
}

fn to_half(value: f32) -> u32 {
    if (p.shape.d_dtype == F16) {
        return f32_to_f16(value);
    }
    return f32_to_bf16(value);
}
