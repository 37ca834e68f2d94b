// Activation functions in f32, mostly v · sigmoid(…).
// Tanh GELU uses 2 · sigmoid(2u) for 1 + tanh(u), which would
// cancel for negative u.
#pragma once
#include "atoms/numeric.cuh"
#include "generated/abi.cuh"

// exp(x) for x ≤ 0, within 1e-7.
// It is 0 below -87, where results would be subnormal.
// Minimax polynomial for |r| up to ln(2) / 2.
QG_DEVICE float exp_nonpositive(float x) {
    // 1.5 · 2^23: the addition rounds a small number.
    // The integer is then in the lowest bits.
    const float round = 12582912.0f;
    const float shifted = x * 1.44269504f + round;
    const float n = shifted - round;
    // x - n · ln(2) in two steps; the first step is exact.
    const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
    float q = 0.00138144672f;
    q = q * r + 0.00836878084f;
    q = q * r + 0.0416683927f;
    q = q * r + 0.166665196f;
    q = q * r + 0.49999994f;
    const float fraction = q * r * r + r + 1.0f;
    const float power = bits_to_f32((f32_to_bits(shifted) - f32_to_bits(round) + 127u) << 23);
    return x > -87.0f ? fraction * power : 0.0f;
}

// ln(1 + exp(x)).
// ln(1 + e) is 2 · atanh(s) with s = e / (2 + e) ≤ 1/3.
// Below -16 it is e up to rounding.
QG_DEVICE float softplus(float x) {
    if (x < -16.0f) return exp_nonpositive(x);
    const float e = exp_nonpositive(x < 0.0f ? x : -x), s = e / (2.0f + e), square = s * s;
    float q = 0.0666666667f;
    q = q * square + 0.0769230769f;
    q = q * square + 0.0909090909f;
    q = q * square + 0.111111111f;
    q = q * square + 0.142857143f;
    q = q * square + 0.2f;
    q = q * square + 0.333333333f;
    q = q * square + 1.0f;
    return (x < 0.0f ? 0.0f : x) + 2.0f * s * q;
}

// Logistic function.
QG_DEVICE float sigmoid(float x) {
    const float e = exp_nonpositive(x < 0.0f ? x : -x);
    return (x < 0.0f ? e : 1.0f) / (1.0f + e);
}

// Normal CDF, (1 + erf(x / sqrt(2))) / 2.
// With z = |x| / sqrt(2) and t = 1 / (1 + 0.4 z) the tail is
// exp(-z²) / 2 times a function of t.
// A polynomial approximates this function within 1e-7 for z ≤
// 9.4; beyond, exp(-z²) is 0.
QG_DEVICE float normal_cdf(float x) {
    const float e = exp_nonpositive(-0.5f * x * x);
    const float t = 1.0f / (1.0f + 0.282842712f * (x < 0.0f ? -x : x));
    float q = 0.0726396814f;
    q = q * t - 0.390246421f;
    q = q * t + 0.68463248f;
    q = q * t - 0.386718899f;
    q = q * t + 0.427957624f;
    q = q * t + 0.126142561f;
    q = q * t + 0.241572797f;
    q = q * t + 0.223938853f;
    q = q * t + 8.12146682e-5f;
    const float tail = 0.5f * e * q;
    return x < 0.0f ? tail : 1.0f - tail;
}

QG_DEVICE float activate(u32 activation, float v) {
    if (activation == QG_ACTIVATION_IDENTITY) return v;
    if (activation == QG_ACTIVATION_RELU) return v < 0.0f ? 0.0f : v;
    if (activation == QG_ACTIVATION_RELU_SQUARED) return v < 0.0f ? 0.0f : v * v;
    if (activation == QG_ACTIVATION_GELU_ERF) return v * normal_cdf(v);
    // Tanh GELU: 2·sqrt(2/pi) · (v + 0.044715 v³).
    const float x = activation == QG_ACTIVATION_SILU ? v : 1.59576912f * (v + 0.044715f * v * v * v);
    return v * sigmoid(x);
}
