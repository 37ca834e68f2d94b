// Fast path of epilogues.
#pragma once
#include "sched/params.cuh"

// Whether D = acc · row_scale · alpha + bias.
// D has the type of X and aligned rows.
// A whitelist: unknown flags take the general path.
QG_DEVICE bool is_plain(const GemmParams& p) {
    constexpr u32 OPERANDS = QG_FLAG_ROW_SCALE | QG_FLAG_K_ORDER | QG_FLAG_BIAS;
    constexpr u32 ALIGNMENTS = QG_FLAG_X_ALIGNED16 | QG_FLAG_D_ALIGNED16 | QG_FLAG_BIAS_ALIGNED16 |
                               QG_FLAG_C_ALIGNED16 | QG_FLAG_RESIDUAL_ALIGNED16;
    constexpr u32 OTHERS = QG_GEMM_FLAGS & ~(OPERANDS | ALIGNMENTS);
    const bool alone = !(p.shape.flags & OTHERS) && p.shape.activation == QG_ACTIVATION_IDENTITY;
    const bool direct = (p.shape.flags & QG_FLAG_D_ALIGNED16) && p.shape.d_dtype == QG_X_DTYPE;
    return alone && direct;
}
