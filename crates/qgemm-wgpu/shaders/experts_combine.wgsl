// MoE combine: weighted sum of a token's slots.
// Slots are added in order.
// An invocation has four features of a token.
// It skips slots without an expert,
// and slots with a NaN weight.

struct Params {
    modes: u32,  // `mode()` reads it
    tokens: u32,
    features: u32,
    top_k: u32,
    experts: u32,
    flags: u32,
    d_row: u32,
    residual_row: u32,
    products_base: u32,
    index_base: u32,
    weights_base: u32,
    residual_base: u32,
    d_base: u32,
}

var<immediate> p: Params;

@group(0) @binding(0) var<storage, read> products: array<f32>;
@group(0) @binding(1) var<storage, read> index: array<u32>;
@group(0) @binding(2) var<storage, read> weights: array<u32>;
@group(0) @binding(7) var<storage, read> residual_words: array<u32>;

fn mode(first_bit: u32) -> u32 {
    return (p.modes >> first_bit) & 15u;
}

fn d_dtype() -> u32 {
    return mode(D_MODE);
}

fn d_first() -> u32 {
    return p.d_base;
}

@compute @workgroup_size(THREADS)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let token = group.y + group.z * groups.y;
    let feature = (group.x * THREADS + thread) * 4u;
    if (token >= p.tokens || feature >= p.features) {
        return;
    }
    let count = min(4u, p.features - feature);
    var sums = vec4<f32>();
    for (var slot = token * p.top_k; slot < (token + 1u) * p.top_k; slot++) {
        let weight = weights[p.weights_base + slot];
        if (index[p.index_base + slot] >= p.experts || (weight & 0x7fffffffu) > 0x7f800000u) {
            continue;
        }
        for (var i = 0u; i < count; i++) {
            sums[i] += bitcast<f32>(weight) * products[p.products_base + slot * p.features + feature + i];
        }
    }
    if ((p.flags & FLAG_RESIDUAL) != 0u) {
        for (var i = 0u; i < count; i++) {
            let at = p.residual_base + token * p.residual_row + feature + i;
            let dtype = mode(RESIDUAL_MODE);
            sums[i] += element(residual_words[word_of(at, dtype)], at, dtype);
        }
    }
    store4(token, feature, count, sums);
}
