// Parameters of kernels that read X by TMA, Hopper and newer.
#pragma once
#include "sched/params.cuh"

// Tensor map of X with aligned rows:
// [tokens][columns], boxes of 64 columns, 128-byte swizzle.
struct alignas(64) TensorMap {
    u64 word[16];
};

struct TmaGemmParams {
    GemmParams gemm;
#if QG_EXPERT_TILES
    // X map: boxes of a token tile, for contiguous rows.
    // W map: boxes of a run of k-tiles.
    // A box has all row tiles of the CTA.
    // Dimensions: bytes (two), k-tiles, row tiles, experts.
    TensorMap x_map, w_map;
#else
    // Maps for whole token tiles and for a partial last one.
    TensorMap x_map, x_tail_map;
#endif
};
