// The parameter of kernels that read X with TMA, Hopper and newer.
#pragma once
#include "sched/params.cuh"

// A tensor map of X, for X with aligned rows: [tokens][columns], boxes of 64 columns, 128-byte swizzle.
struct alignas(64) TensorMap {
    u64 word[16];
};

struct TmaGemmParams {
    GemmParams gemm;
#if QG_EXPERT_TILES
    // Maps with boxes of a token tile, where rows follow one another, and of a run of k-tiles of a CTA's row tiles, whose dimensions are
    // bytes (two), k-tiles, row tiles and experts.
    TensorMap x_map, w_map;
#else
    // Maps with boxes of a whole token tile, and of the last token tile where that is no whole one.
    TensorMap x_map, x_tail_map;
#endif
};
