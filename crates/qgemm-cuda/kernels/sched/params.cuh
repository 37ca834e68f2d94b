// The parameter of kernels that compute one product.
#pragma once
#include "generated/abi.cuh"

// Whether the kernel computes products with experts (`sched/experts.cuh`): 1 in the prelude of those alone.
#ifndef QG_EXPERTS
#define QG_EXPERTS 0
#endif

struct GemmParams {
    CudaGemmShape shape;
    GemmPointers at;
    TileSchedule tiles;
};
