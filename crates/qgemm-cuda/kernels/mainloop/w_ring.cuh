// Ring of packed W k-tiles in shared memory.
// Lanes read their codes 16 bytes at a time.
#pragma once
#include "dequant/operand.cuh"
#include "mainloop/row_tiles.cuh"

// Row tiles of a CTA.
constexpr u32 CTA_ROW_TILES = QG_WARPS_N * ROW_TILES;

struct WStage {
    alignas(16) u8 k_tile[CTA_ROW_TILES][QG_K_TILE_BYTES];  // [row tile][byte]
};
