// The parameter of kernels that compute one product.
#pragma once
#include "generated/abi.cuh"

struct GemmParams {
    CudaGemmShape shape;
    GemmPointers at;
    TileSchedule tiles;
};
