// The parameter of kernels that compute one product.
#pragma once
#include "generated/abi.cuh"

// Whether the kernel computes products with experts (`sched/experts.cuh`): 1 in the prelude of those alone.
#ifndef QG_EXPERTS
#define QG_EXPERTS 0
#endif
// Whether each of its CTAs takes tiles of all experts in turn, and not one: 1 in the prelude of those with a producer warpgroup.
#ifndef QG_EXPERT_TILES
#define QG_EXPERT_TILES 0
#endif
// Whether the kernel writes segments where they belong (`sched/projection.cuh`), and, with few tokens, normalizes X itself
// (`mainloop/normalized_x.cuh`): 1 in the prelude of those alone.
#ifndef QG_PROJECTION
#define QG_PROJECTION 0
#endif
// Whether it keeps all of X in shared memory (`mainloop/resident_x.cuh`): 1 in the prelude of those that do.
#ifndef QG_RESIDENT_X
#define QG_RESIDENT_X 0
#endif
// Whether its CTAs take tiles in turn, each of the segment where it lies: 1 in the prelude of such projections.
#ifndef QG_SEGMENT_TILES
#define QG_SEGMENT_TILES 0
#endif
// Rows of X that a CTA keeps in shared memory, of which the others of its tile are copies: fewer than those of the tile in the prelude of
// kernels for one token alone.
#ifndef QG_X_ROWS
#define QG_X_ROWS QG_TILE_M
#endif
// CTAs along M that share a work tile: more than 1 in the prelude of kernels whose CTAs form clusters.
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
