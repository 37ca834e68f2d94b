// Activation of a gated pair: D = of_gate(gate) · of_up(up).
// A pair has no C.
// Its fields hold the numbers of a clamped SwiGLU.
#pragma once
#include "epilogue/activation.cuh"
#include "sched/params.cuh"

QG_DEVICE bool is_clamped(const GemmParams& p) {
    return p.shape.activation == QG_ACTIVATION_CLAMPED_SWIGLU;
}

QG_DEVICE float swiglu_alpha(const GemmParams& p) {
    return bits_to_f32((u32)p.at.c_row);
}

QG_DEVICE float swiglu_limit(const GemmParams& p) {
    return bits_to_f32((u32)(p.at.c_row >> 32));
}

// Comparisons keep NaN, unlike the minimum.
QG_DEVICE float clamped_gate(const GemmParams& p, float gate) {
    const float limit = swiglu_limit(p);
    return gate > limit ? limit : gate;
}

QG_DEVICE float of_up(const GemmParams& p, float up) {
    if (!is_clamped(p)) return up;
    const float limit = swiglu_limit(p);
    return (up > limit ? limit : up < -limit ? -limit : up) + p.shape.beta;
}

QG_DEVICE float of_gate(const GemmParams& p, float gate) {
    if (!is_clamped(p)) return activate(p.shape.activation, gate);
    const float g = clamped_gate(p, gate);
    return g * sigmoid(swiglu_alpha(p) * g);
}
