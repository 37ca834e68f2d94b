// Fast path of epilogues.
#pragma once
#include "sched/params.cuh"

// Whether D = acc · row_scale · alpha + bias.
// D has the type of X and aligned rows.
QG_DEVICE bool is_plain(const GemmParams& p) {
    constexpr u32 OPERANDS = QG_FLAG_ROW_SCALE | QG_FLAG_K_ORDER | QG_FLAG_BIAS;
    const bool alone = has_only<OPERANDS>(p) && p.shape.activation == QG_ACTIVATION_IDENTITY;
    const bool direct = (p.shape.flags & QG_FLAG_D_ALIGNED16) && p.shape.d_dtype == QG_X_DTYPE;
    return alone && direct;
}
