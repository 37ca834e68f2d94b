// The fast path of epilogues: outputs for which kernels have code of their own.
#pragma once
#include "sched/params.cuh"

// Whether an output is the accumulator times a factor of its row, plus a bias, in the type of X, and rows of D are
// aligned.
QG_DEVICE bool is_plain(const GemmParams& p) {
    constexpr u32 OTHERS = QG_FLAG_C | QG_FLAG_RESIDUAL | QG_FLAG_TOKEN_SCALE | QG_FLAG_X_FACTOR | QG_FLAG_GATED;
    const bool alone = !(p.shape.flags & OTHERS) && p.shape.activation == QG_ACTIVATION_IDENTITY;
    const bool direct = (p.shape.flags & QG_FLAG_D_ALIGNED16) && p.shape.d_dtype == QG_X_DTYPE;
    return alone && direct;
}
