// The accumulators of `matmul` on `mma.sync`: a warp has WARP_M × WARP_N of the tile, as 16 × 8 products.
#pragma once
#include "atoms/types.cuh"

constexpr u32 WARPS = QG_WARPS_M * QG_WARPS_N;
static_assert(WARPS * 32 == QG_THREADS, "every warp has a part of the tile");
constexpr u32 WARP_M = QG_TILE_M / QG_WARPS_M, WARP_N = QG_TILE_N / QG_WARPS_N;
constexpr u32 M_TILES = WARP_M / 16, N_TILES = WARP_N / 8;
constexpr u32 ACCUMULATORS = M_TILES * N_TILES * 4;

struct Accumulators {
    float value[M_TILES][N_TILES][4];
};
