// FP8 GEMM problem of a work tile.
// With experts it is the product of an expert's rows, and
// starts at the first of these rows.
#pragma once
#include "mainloop/fp8_codes.cuh"
#include "sched/tile.cuh"

#if QG_EXPERT_TILES
using Fp8Problem = Fp8GemmParams;

QG_DEVICE Fp8GemmParams problem_of(const Fp8GemmParams& params, const WorkTile& work) {
    Fp8GemmParams own = params;
    OwnRows::narrow(work.own, own.gemm);
    own.gemm.at.x = params.gemm.at.x + work.own.first * params.gemm.at.x_row;
    own.x_scales += work.own.first * params.x_scale_row;
    return own;
}
#else
using Fp8Problem = const Fp8GemmParams&;

QG_DEVICE const Fp8GemmParams& problem_of(const Fp8GemmParams& params, const WorkTile&) {
    return params;
}
#endif
