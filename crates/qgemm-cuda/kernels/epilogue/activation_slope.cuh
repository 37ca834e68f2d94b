// Derivatives of the activation functions in f32.
#pragma once
#include "epilogue/activation.cuh"

QG_DEVICE float activation_slope(u32 activation, float at) {
    if (activation == QG_ACTIVATION_IDENTITY) return 1.0f;
    // NaN stays NaN.
    if (activation == QG_ACTIVATION_RELU) return at > 0.0f ? 1.0f : at <= 0.0f ? 0.0f : at;
    if (activation == QG_ACTIVATION_RELU_SQUARED) return at < 0.0f ? 0.0f : 2.0f * at;
    // Beyond ±64 slopes are 0 or 1 in f32; clamping avoids overflow.
    const float v = at < -64.0f ? -64.0f : at > 64.0f ? 64.0f : at;
    if (activation == QG_ACTIVATION_GELU_ERF) return normal_cdf(v) + v * 0.398942280f * exp_nonpositive(-0.5f * v * v);
    // v · sigmoid(x) with dx = dx/dv.
    const bool is_silu = activation == QG_ACTIVATION_SILU;
    const float x = is_silu ? v : 1.59576912f * (v + 0.044715f * v * v * v);
    const float dx = is_silu ? 1.0f : 1.59576912f + 0.214064449f * v * v;
    return sigmoid(x) + v * dx * sigmoid(x) * sigmoid(-x);
}
