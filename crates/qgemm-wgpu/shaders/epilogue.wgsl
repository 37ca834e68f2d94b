// What becomes of a finished sum:
//     v = alpha * row_scale * token_scale * sum + beta * C + bias
//     D = activation(v) + residual, or, of a gated pair, activation(v of the gate) * v of the up + residual
//
// Kernels count W's rows by position. A gated pair's rows stand in groups of 16, eight of the gate and then the same eight
// of the up; its positions bring two of each together: 4i and 4i + 1 are rows 2i and 2i + 1 of the group's gate, 4i + 2
// and 4i + 3 those of its up. So the four sums of an invocation are four features, or two of a gated pair.

fn row_at(position: u32) -> u32 {
    if (!has(FLAG_GATED)) {
        return position;
    }
    let place = position & 15u;
    return (position - place) + ((place & 2u) << 2u) + ((place >> 2u) << 1u) + (place & 1u);
}

// What is stored for four sums that begin at one position.
struct Outputs {
    feature: u32,       // the first
    count: u32,         // 0 where all lie beyond N
    values: vec4<f32>,
}

fn outputs(m: u32, position: u32, four_sums: vec4<f32>) -> Outputs {
    var sums = four_sums;
    var out: Outputs;
    if (has(FLAG_GATED)) {
        out.feature = position >> 1u;
        out.count = min(2u, max(p.shape.features, out.feature) - out.feature);
        for (var i = 0u; i < out.count; i++) {
            let feature = out.feature + i;
            let gate = linear(m, row_at(position + i), feature, sums[i]);
            let up = linear(m, row_at(position + i + 2u), p.shape.features + feature, sums[i + 2u]);
            out.values[i] = activate(gate) * up + residual(m, feature);
        }
    } else {
        out.feature = position;
        out.count = min(4u, p.shape.features - position);
        for (var i = 0u; i < out.count; i++) {
            let feature = position + i;
            out.values[i] = activate(linear(m, feature, feature, sums[i])) + residual(m, feature);
        }
    }
    return out;
}

// The v of one sum.
fn linear(m: u32, row: u32, bias_index: u32, sum: f32) -> f32 {
    var value = p.shape.alpha * sum;
    if (has(FLAG_ROW_SCALE)) {
        value *= row_scale[p.row_scale_base + row];
    }
    if (has(FLAG_TOKEN_SCALE)) {
        value *= token_scale[p.token_scale_base + m];
    }
    if (has(FLAG_C)) {
        let index = p.c_base + m * p.c_row + row;
        value += p.shape.beta * element(c_words[word_of(index, p.shape.c_dtype)], index, p.shape.c_dtype);
    }
    if (has(FLAG_BIAS)) {
        let index = p.bias_base + bias_index;
        value += element(bias_words[word_of(index, p.shape.bias_dtype)], index, p.shape.bias_dtype);
    }
    return value;
}

fn residual(m: u32, feature: u32) -> f32 {
    if (!has(FLAG_RESIDUAL)) {
        return 0.0;
    }
    let index = p.residual_base + m * p.residual_row + feature;
    return element(residual_words[word_of(index, p.shape.residual_dtype)], index, p.shape.residual_dtype);
}

fn activate(v: f32) -> f32 {
    // Beyond 64 every function is v or 0 in f32, and powers of v stay within its range.
    let x = clamp(v, -64.0, 64.0);
    switch p.shape.activation {
        case ACTIVATION_RELU: { return max(v, 0.0); }
        case ACTIVATION_SILU: { return v * sigmoid(clamp(v, -100.0, 100.0)); }
        // (1 + tanh(u)) / 2 is sigmoid(2u), which does not cancel.
        case ACTIVATION_GELU_TANH: { return v * sigmoid(1.59576912 * (x + 0.044715 * x * x * x)); }
        case ACTIVATION_GELU_ERF: { return v * normal_cdf(x); }
        default: { return v; }
    }
}

fn sigmoid(x: f32) -> f32 {
    let e = exp(-abs(x));
    return select(1.0, e, x < 0.0) / (1.0 + e);
}

// (1 + erf(x / sqrt(2))) / 2. Its tail at z = |x| / sqrt(2) is exp(-z * z) / 2 times a function of t = 1 / (1 + 0.4 z),
// which the polynomial meets within 1e-7 for z up to 9.4; beyond, exp(-z * z) is 0.
fn normal_cdf(x: f32) -> f32 {
    let t = 1.0 / (1.0 + 0.282842712 * abs(x));
    var q = 0.0726396814;
    q = q * t - 0.390246421;
    q = q * t + 0.68463248;
    q = q * t - 0.386718899;
    q = q * t + 0.427957624;
    q = q * t + 0.126142561;
    q = q * t + 0.241572797;
    q = q * t + 0.223938853;
    q = q * t + 8.12146682e-5;
    let tail = 0.5 * exp(-0.5 * x * x) * q;
    return select(1.0 - tail, tail, x < 0.0);
}
