// The parameter of kernels whose X the copy engine brings, Hopper and newer.
#pragma once
#include "sched/params.cuh"

// X as the copy engine knows it, if its rows are aligned: [tokens][columns], boxes of a stage of 64 columns, 128-byte swizzle.
struct alignas(64) TensorMap {
    u64 word[16];
};

struct FedGemmParams {
    GemmParams gemm;
    TensorMap x_map;
};
