// W k-tiles that are not aligned to cache lines, because
// scales follow their codes.
// TMA boxes whose rows straddle two lines request both lines
// for each row and saturate L2.
// So whole lines are copied. A k-tile starts somewhere in its
// first line, and its scales come along.
#pragma once
#include "mainloop/fp8_codes.cuh"

// Line size, and the unit of addresses and descriptors.
constexpr u32 W_LINE = 128, W_UNIT = 16;
// Row tiles of the CTA, and lines that hold a k-tile, wherever
// it starts in the first.
constexpr u32 W_ROW_TILES = QG_TILE_N / 16, TILE_LINES = (QG_K_TILE_BYTES + W_LINE - W_UNIT) / W_LINE;
constexpr u32 LINES_BYTES = TILE_LINES * W_LINE;
static_assert(LINES_BYTES >= QG_K_TILE_BYTES + W_LINE - W_UNIT && QG_K_TILE_BYTES % W_UNIT == 0, "a k-tile is in its lines");
static_assert(K_TILE_K_BLOCKS == STAGE_K_BLOCKS, "a stage is a k-tile");
// Bytes of a stage, rounded up to the period of TMA's swizzle.
constexpr u32 W_STAGE_BYTES = (W_ROW_TILES * LINES_BYTES + 1023) / 1024 * 1024;

// Location of k-tile `k` of a row tile.
struct KTileLines {
    // is_last: in `TmaFp8GemmParams::w_last_map`, for the last
    // k-tile of row tiles that are not whole lines.
    // line: first line in the map. unit: units to the codes.
    bool is_last;
    u32 line, unit;

    QG_DEVICE KTileLines of(u32 k, u32 k_tiles) {
        const u32 units = k * (QG_K_TILE_BYTES / W_UNIT), of_line = W_LINE / W_UNIT;
        if (k + 1 == k_tiles && k_tiles * QG_K_TILE_BYTES % W_LINE != 0) return {true, 0, (LINES_BYTES - QG_K_TILE_BYTES) / W_UNIT};
        return {false, units / of_line, units % of_line};
    }
};

// Scale of the first or second eight rows of a row tile.
// The address follows TMA's swizzle.
QG_DEVICE float w_scale(const u8* stage, u32 row_tile, u32 unit, u32 eight) {
    const u32 place = row_tile * LINES_BYTES + unit * W_UNIT + QG_SCALE_OFFSET + eight * 4;
    return ld_shared(reinterpret_cast<const float*>(stage + (place ^ place / W_LINE % 8 * W_UNIT)));
}
