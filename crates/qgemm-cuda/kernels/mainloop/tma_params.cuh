// The parameter of kernels whose X the copy engine brings, Hopper and newer.
#pragma once
#include "sched/params.cuh"

// X as the copy engine knows it, if its rows are aligned: [tokens][columns], boxes of 64 columns, 128-byte swizzle.
struct alignas(64) TensorMap {
    u64 word[16];
};

struct TmaGemmParams {
    GemmParams gemm;
    // Boxes of the block's tokens, and of those of the last tile of tokens where it is no whole one.
    TensorMap x_map, x_tail_map;
};
