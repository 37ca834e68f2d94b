// Row tiles of W of a warp, in global memory.
#pragma once
#include "sched/params.cuh"

constexpr u32 ROW_TILES = QG_ROW_TILES;

// K-tile `k_tile` of row tile `tile`.
// Past the last tile the last one is recomputed, not stored.
QG_DEVICE const u8* row_tile(const GemmParams& p, u32 tile, u32 k_tile) {
    const u32 last = (p.shape.stored_rows + QG_TILE_ROWS - 1) / QG_TILE_ROWS - 1;
    return reinterpret_cast<const u8*>(p.at.w) +
           ((u64)(tile < last ? tile : last) * p.shape.k_tiles + k_tile) * QG_K_TILE_BYTES;
}
