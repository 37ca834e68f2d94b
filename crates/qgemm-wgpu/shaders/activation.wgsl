// Activation functions, selected by `ACTIVATION_MODE`.

fn activate(v: vec4<f32>) -> vec4<f32> {
    // Beyond ±64 each function is v or 0.
    // The clamp keeps powers of v in range.
    let x = clamp(v, vec4<f32>(-64.0), vec4<f32>(64.0));
    switch mode(ACTIVATION_MODE) {
        case ACTIVATION_RELU: { return select(v, vec4<f32>(), v < vec4<f32>()); }
        case ACTIVATION_RELU_SQUARED: { return select(v * v, vec4<f32>(), v < vec4<f32>()); }
        case ACTIVATION_SILU: { return v * sigmoid(clamp(v, vec4<f32>(-100.0), vec4<f32>(100.0))); }
        // sigmoid(2u) = (1 + tanh(u)) / 2, without cancellation.
        case ACTIVATION_GELU_TANH: { return v * sigmoid(1.59576912 * (x + 0.044715 * x * x * x)); }
        case ACTIVATION_GELU_ERF: { return v * normal_cdf(x); }
        default: { return v; }
    }
}

fn sigmoid(x: vec4<f32>) -> vec4<f32> {
    let e = exp(-abs(x));
    return select(vec4<f32>(1.0), e, x < vec4<f32>()) / (vec4<f32>(1.0) + e);
}

// Normal CDF: (1 + erf(x / sqrt(2))) / 2.
// Its tail at z = |x| / sqrt(2) is
// q(t) * exp(-z * z) / 2,
// with t = 1 / (1 + 0.4 z).
// The polynomial approximates q within 1e-7 up to z = 9.4.
// Beyond, exp(-z * z) is 0.
fn normal_cdf(x: vec4<f32>) -> vec4<f32> {
    let t = vec4<f32>(1.0) / (vec4<f32>(1.0) + 0.282842712 * abs(x));
    var q = vec4<f32>(0.0726396814);
    q = q * t - vec4<f32>(0.390246421);
    q = q * t + vec4<f32>(0.68463248);
    q = q * t - vec4<f32>(0.386718899);
    q = q * t + vec4<f32>(0.427957624);
    q = q * t + vec4<f32>(0.126142561);
    q = q * t + vec4<f32>(0.241572797);
    q = q * t + vec4<f32>(0.223938853);
    q = q * t + vec4<f32>(8.12146682e-5);
    let tail = 0.5 * exp(-0.5 * x * x) * q;
    return select(vec4<f32>(1.0) - tail, tail, x < vec4<f32>());
}
