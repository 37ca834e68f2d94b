// Slabs of W in shared memory as they lie in global memory: a warp copies those of its own rows, and lanes read their
// codes 16 bytes at a time.
#pragma once
#include "dequant/operand.cuh"
#include "mainloop/row_tiles.cuh"

// Tiles of rows of a block.
constexpr u32 CTA_ROW_TILES = QG_WARPS_N * ROW_TILES;

struct WStage {
    alignas(16) u8 k_tile[CTA_ROW_TILES][QG_K_TILE_BYTES];
};
