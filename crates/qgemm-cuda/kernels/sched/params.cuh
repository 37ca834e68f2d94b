// Parameters of GEMM kernels, and defaults of their options.
// The prelude of a kernel sets the options that it uses.
#pragma once
#include "generated/abi.cuh"

// MoE GEMM (`sched/experts.cuh`).
#ifndef QG_EXPERTS
#define QG_EXPERTS 0
#endif
// Persistent MoE GEMM: a CTA takes tiles of all experts in turn.
// Kernels with a producer warpgroup do so.
#ifndef QG_EXPERT_TILES
#define QG_EXPERT_TILES 0
#endif
// Several output segments (`sched/projection.cuh`).
// With few tokens the kernel also normalizes X
// (`mainloop/normalized_x.cuh`).
#ifndef QG_PROJECTION
#define QG_PROJECTION 0
#endif
// All of X is resident in shared memory
// (`mainloop/resident_x.cuh`).
#ifndef QG_RESIDENT_X
#define QG_RESIDENT_X 0
#endif
// Persistent grid over output segments:
// each tile uses the segment that contains it.
#ifndef QG_SEGMENT_TILES
#define QG_SEGMENT_TILES 0
#endif
// Rows of X in shared memory.
// Kernels for one token keep fewer than QG_TILE_M; the other
// rows of the tile are copies.
#ifndef QG_X_ROWS
#define QG_X_ROWS QG_TILE_M
#endif
// Cluster size: CTAs along M that share a work tile.
#ifndef QG_CLUSTER
#define QG_CLUSTER 1
#endif

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
