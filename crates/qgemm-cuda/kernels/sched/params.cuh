// Parameters of GEMM kernels.
#pragma once
#include "generated/abi.cuh"

struct GemmParams {
    CudaGemmShape shape;
    GemmPointers at;
    TileSchedule tiles;
#if QG_EXPERTS
    ExpertGroups groups;
#endif
#if QG_PROJECTION
    ProjectionOperands projection;
#endif
};
