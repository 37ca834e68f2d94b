// Slabs of W in shared memory as they lie in global memory: a warp copies those of its own rows, and lanes read their
// codes 16 bytes at a time.
#pragma once
#include "dequant/operand.cuh"
#include "sched/params.cuh"

constexpr u32 ROW_TILES = QG_ROW_TILES;
// Tiles of rows of a block.
constexpr u32 BLOCK_ROW_TILES = QG_WARPS_N * ROW_TILES;

struct WStage {
    alignas(16) u8 slab[BLOCK_ROW_TILES][QG_SLAB_BYTES];
};

// Slab `slab` of tile `tile` of W. Tiles beyond the last are computed once more and not stored.
QG_DEVICE const u8* row_tile(const GemmParams& p, u32 tile, u32 slab) {
    const u32 last = (p.shape.n + QG_TILE_ROWS - 1) / QG_TILE_ROWS - 1;
    return reinterpret_cast<const u8*>(p.at.w) + ((u64)(tile < last ? tile : last) * p.shape.k_slabs + slab) * QG_SLAB_BYTES;
}
