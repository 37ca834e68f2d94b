// Optimizer step (SGD, AdamW; see RULE).
// An invocation updates pairs of parameters.
// `*_base` offsets count elements.

struct Params {
    shape: OptimizerShape,  // of this dispatch
    weights_base: u32,
    gradient_base: u32,
    moment1_base: u32,
    moment2_base: u32,
    step_base: u32,
    copy_base: u32,
}

var<immediate> p: Params;

@group(0) @binding(0) var<storage, read> gradient_words: array<u32>;
@group(0) @binding(1) var<storage, read> step_words: array<u32>;
@group(0) @binding(2) var<storage, read_write> weights: array<f32>;
@group(0) @binding(3) var<storage, read_write> moment1: array<f32>;
@group(0) @binding(4) var<storage, read_write> moment2: array<f32>;
@group(0) @binding(5) var<storage, read_write> copy: array<atomic<u32>>;

const ADAMW: u32 = 0u;
const SGD: u32 = 1u;

fn factor_of_step(i: u32) -> f32 {
    return bitcast<f32>(step_words[p.step_base + i]);
}

// Updates a parameter and returns it.
fn moved(i: u32) -> f32 {
    let index = p.gradient_base + i;
    let dtype = p.shape.gradient;
    let g = element(gradient_words[word_of(index, dtype)], index, dtype) * factor_of_step(3u);
    var update = g;
    if (RULE != SGD) {
        let at = p.moment1_base + i;
        update = p.shape.decay1 * moment1[at] + p.shape.gain1 * g;
        moment1[at] = update;
    }
    if (RULE == ADAMW) {
        let at = p.moment2_base + i;
        let second = p.shape.decay2 * moment2[at] + p.shape.gain2 * (g * g);
        moment2[at] = second;
        update /= sqrt(second) * factor_of_step(1u) + p.shape.eps;
    }
    let at = p.weights_base + i;
    let weight = weights[at];
    let result = weight - (factor_of_step(0u) * update + factor_of_step(2u) * weight);
    weights[at] = result;
    return result;
}

@compute @workgroup_size(THREADS)
fn main(
    @builtin(global_invocation_id) id: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
) {
    let i = (id.x + id.y * groups.x * THREADS) * 2u;
    if (i >= p.shape.len) {
        return;
    }
    let count = min(2u, p.shape.len - i);
    var pair = vec2<f32>(moved(i), 0.0);
    if (count == 2u) {
        pair.y = moved(i + 1u);
    }
    if ((p.shape.flags & FLAG_COPY) != 0u) {
        store_copy(p.copy_base + i, count, p.shape.copy, pair);
    }
}
