// GEMM epilogue:
//   v = alpha * row_scale * token_scale * acc
//       + beta * C + bias
//   D = activation(v) + residual
//   D = of_gate(v_gate) * of_up(v_up) + residual  (gated pair)
//
// An invocation finishes four rows of W and the four rows
// eight further; `row % 16` is 0 or 4.
// Rows of a gated pair form groups of 16:
// eight gate rows, then the up rows of the same eight features.
// The invocation then has gate and up of four features.

const NO_ROW: u32 = 0xffffffffu;

// Stores rows `row .. row + 4` and `row + 8 .. row + 12` of
// the tile's token `token`.
// A loop, to keep one copy of the epilogue code:
// drivers inline calls.
fn store8(token: u32, row: u32, low: vec4<f32>, high: vec4<f32>) {
    let m = d_row_of(token);
    if (m == NO_ROW) {
        return;
    }
    let gated = has(FLAG_GATED);
    let pair_feature = (row - row % 16u) / 2u + row % 16u;
    var up: vec4<f32>;
    for (var half = select(1u, 2u, row + 8u < p.shape.stored_rows); half > 0u; half--) {
        let second = half == 2u;
        let of_half = row + select(0u, 8u, second);
        let feature = select(of_half, pair_feature, gated);
        let count = min(4u, max(p.shape.out_features, feature) - feature);
        if (count == 0u) {
            continue;
        }
        let bias_index = feature + select(0u, p.shape.out_features, gated && second);
        let value = linear(m, of_half, bias_index, count, select(low, high, second));
        if (gated && second) {
            up = of_up(value);
        } else {
            let finished = of_gate(value) * select(vec4<f32>(1.0), up, gated);
            store4(m, feature, count, finished + residual(m, feature, count));
        }
    }
}

// Activation of a gate, or of a single output.
fn of_gate(v: vec4<f32>) -> vec4<f32> {
    if (mode(ACTIVATION_MODE) != ACTIVATION_CLAMPED_SWIGLU) {
        return activate(v);
    }
    let limit = vec4<f32>(swiglu_limit());
    // A selection keeps NaN.
    let gate = select(v, limit, v > limit);
    return gate * sigmoid(clamp(swiglu_alpha() * gate, vec4<f32>(-100.0), vec4<f32>(100.0)));
}

fn of_up(v: vec4<f32>) -> vec4<f32> {
    if (mode(ACTIVATION_MODE) != ACTIVATION_CLAMPED_SWIGLU) {
        return v;
    }
    let limit = vec4<f32>(swiglu_limit());
    return select(select(v, -limit, v < -limit), limit, v > limit) + p.shape.beta;
}

// Four indices from `first` on, clamped to `count` indices.
fn four(first: u32, count: u32) -> vec4<u32> {
    return vec4<u32>(first) + min(vec4<u32>(0u, 1u, 2u, 3u), vec4<u32>(count - 1u));
}

// v of `count` accumulators.
fn linear(m: u32, row: u32, bias_index: u32, count: u32, sums: vec4<f32>) -> vec4<f32> {
    var value = p.shape.alpha * sums;
    if (has(FLAG_ROW_SCALE)) {
        let at = four(row_scale_first() + row, count);
        value *= vec4<f32>(row_scale[at.x], row_scale[at.y], row_scale[at.z], row_scale[at.w]);
    }
    if (has(FLAG_TOKEN_SCALE)) {
        value *= token_scale_of(m);
    }
    if (has(FLAG_C)) {
        let at = four(c_first() + m * c_row() + row, count);
        let i = words_of(at, mode(C_MODE));
        let words = vec4<u32>(c_words[i.x], c_words[i.y], c_words[i.z], c_words[i.w]);
        value += p.shape.beta * elements(words, at, mode(C_MODE));
    }
    if (has(FLAG_BIAS)) {
        let at = four(bias_first() + bias_index, count);
        let i = words_of(at, mode(BIAS_MODE));
        let words = vec4<u32>(bias_words[i.x], bias_words[i.y], bias_words[i.z], bias_words[i.w]);
        value += elements(words, at, mode(BIAS_MODE));
    }
    return value;
}

fn residual(m: u32, feature: u32, count: u32) -> vec4<f32> {
    if (!has(FLAG_RESIDUAL)) {
        return vec4<f32>();
    }
    let at = four(residual_first() + m * p.residual_row + feature, count);
    let i = words_of(at, mode(RESIDUAL_MODE));
    let words = vec4<u32>(residual_words[i.x], residual_words[i.y], residual_words[i.z], residual_words[i.w]);
    return elements(words, at, mode(RESIDUAL_MODE));
}
