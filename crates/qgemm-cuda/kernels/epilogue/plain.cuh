// The fast paths of epilogues: outputs for which kernels have code of their own.
#pragma once
#include "sched/params.cuh"

// Flags that change outputs, but for those of OPERANDS. A path lists what it allows: an operand that it does not know is none of its own.
template <u32 OPERANDS>
QG_DEVICE bool has_others(const GemmParams& p) {
    constexpr u32 ALIGNMENTS = QG_FLAG_X_ALIGNED16 | QG_FLAG_D_ALIGNED16 | QG_FLAG_BIAS_ALIGNED16 |
                               QG_FLAG_C_ALIGNED16 | QG_FLAG_RESIDUAL_ALIGNED16;
    return p.shape.flags & (QG_GEMM_FLAGS & ~(OPERANDS | ALIGNMENTS));
}

// Whether rows of D are aligned, in the type of X.
QG_DEVICE bool is_direct(const GemmParams& p) {
    return (p.shape.flags & QG_FLAG_D_ALIGNED16) && p.shape.d_dtype == QG_X_DTYPE;
}

// Whether an output is the accumulator times a factor of its row, plus a bias.
QG_DEVICE bool is_plain(const GemmParams& p) {
    const bool others = has_others<QG_FLAG_ROW_SCALE | QG_FLAG_K_ORDER | QG_FLAG_BIAS>(p);
    const bool alone = !others && p.shape.activation == QG_ACTIVATION_IDENTITY;
    const bool direct = is_direct(p);
    return alone && direct;
}

// Rows of W that have outputs: two a feature of a gated pair.
QG_DEVICE u32 rows_of_outputs(const GemmParams& p) {
    return p.shape.flags & QG_FLAG_GATED ? 2 * p.shape.out_features : p.shape.out_features;
}

// Whether it is that, or the activation of it, or a gate's times an up, with or without a residual of the same kind.
QG_DEVICE bool is_activated(const GemmParams& p) {
    constexpr u32 OPERANDS = QG_FLAG_ROW_SCALE | QG_FLAG_K_ORDER | QG_FLAG_BIAS | QG_FLAG_GATED | QG_FLAG_RESIDUAL;
    const bool adds = p.shape.flags & QG_FLAG_RESIDUAL;
    const bool like_d = (p.shape.flags & QG_FLAG_RESIDUAL_ALIGNED16) && p.shape.residual_dtype == QG_X_DTYPE;
    return (!adds || like_d) && !has_others<OPERANDS>(p) && is_direct(p);
}
