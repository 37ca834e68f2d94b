// Matmul epilogue: alpha, C or the old D, bias, activation or
// its derivative, D.
#pragma once
#include "epilogue/activation_slope.cuh"
#include "epilogue/operands.cuh"
#include "sched/matmul_tile.cuh"

// alpha times the per-tensor scales of A and B.
QG_DEVICE float matmul_alpha(const MatmulParams& p) {
    float alpha = p.shape.alpha;
    if constexpr (QG_MAY_SCALE) {
        if (p.shape.flags & QG_FLAG_A_SCALE) alpha *= load_dense(DTYPE_F32, p.at.a_scale, 0);
        if (p.shape.flags & QG_FLAG_B_SCALE) alpha *= load_dense(DTYPE_F32, p.at.b_scale, 0);
    }
    return alpha;
}

// Finishes and stores RUN consecutive outputs of a row,
// clipped to D. `column` is a multiple of RUN.
QG_DEVICE void store_matmul_run(const MatmulParams& p, u32 product, u32 row, u32 column, float (&v)[RUN]) {
    if (row >= p.shape.m || column >= p.shape.n) return;
    const u32 flags = p.shape.flags, left = p.shape.n - column, count = left < RUN ? left : RUN;
    const u64 at = product * p.at.d_batch + row * p.at.d_row + column;
    const float alpha = matmul_alpha(p);
#pragma unroll
    for (u32 i = 0; i < RUN; i++) v[i] *= alpha;
    float added[RUN] = {};
    if (flags & (QG_FLAG_C | QG_FLAG_ACCUMULATES)) {
        if (flags & QG_FLAG_C)
            load_dense_run(added, p.types.c_dtype, p.at.c, product * p.at.c_batch + row * p.at.c_row + column,
                           flags & QG_FLAG_C_ALIGNED16, count);
        else
            load_dense_run(added, p.types.d_dtype, p.at.d, at, flags & QG_FLAG_D_ALIGNED16, count);
        if (!(flags & QG_FLAG_SLOPE)) {
#pragma unroll
            for (u32 i = 0; i < RUN; i++) v[i] += p.shape.beta * added[i];
        }
    }
    if (flags & QG_FLAG_BIAS) {
        float bias[RUN];
        load_dense_run(bias, p.types.bias_dtype, p.at.bias, column, false, count);
#pragma unroll
        for (u32 i = 0; i < RUN; i++) v[i] += bias[i];
    }
    if (flags & QG_FLAG_SLOPE) {
#pragma unroll
        for (u32 i = 0; i < RUN; i++) v[i] *= activation_slope(p.types.activation, added[i]);
    } else if (p.types.activation != QG_ACTIVATION_IDENTITY) {
#pragma unroll
        for (u32 i = 0; i < RUN; i++) v[i] = activate(p.types.activation, v[i]);
    }
    store_dense_run(p.types.d_dtype, p.at.d, at, flags & QG_FLAG_D_ALIGNED16, count, v);
}
