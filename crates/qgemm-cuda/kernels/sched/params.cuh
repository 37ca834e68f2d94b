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

// Whether a problem has no operands, functions or layouts but OPERANDS (flags).
// Fast epilogues list what they serve, so that unknown flags take the
// general path.
template <u32 OPERANDS>
QG_DEVICE bool has_only(const GemmParams& p) {
    constexpr u32 ALIGNMENTS = QG_FLAG_X_ALIGNED16 | QG_FLAG_D_ALIGNED16 | QG_FLAG_BIAS_ALIGNED16 | QG_FLAG_C_ALIGNED16 |
                               QG_FLAG_RESIDUAL_ALIGNED16;
    return !(p.shape.flags & QG_GEMM_FLAGS & ~(OPERANDS | ALIGNMENTS));
}
