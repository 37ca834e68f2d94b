// The parameter of kernels that compute one product.
#pragma once
#include "generated/abi.cuh"

struct GemmParams {
    GemmShape shape;
    GemmModes modes;
    GemmPointers at;
    TileSchedule tiles;
};
