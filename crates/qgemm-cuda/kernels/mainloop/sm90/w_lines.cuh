// Packed k-tiles of W that do not begin with lines of the cache, because scales stand behind their codes. Boxes whose rows lie across two
// lines ask the cache twice for each (of 64 tokens, 28672x8192, 70 and 48 % of the requests that an H200's cache can serve). So whole
// lines are copied, and a k-tile begins somewhere in the first of them. They bring its scales along.
#pragma once
#include "mainloop/fp8_codes.cuh"

// A line, and what addresses and descriptors count.
constexpr u32 W_LINE = 128, W_UNIT = 16;
// The row tiles of a CTA. Lines with the k-tile of one, wherever that begins, and their bytes.
constexpr u32 W_ROW_TILES = QG_TILE_N / 16, TILE_LINES = (QG_K_TILE_BYTES + W_LINE - W_UNIT) / W_LINE;
constexpr u32 LINES_BYTES = TILE_LINES * W_LINE;
static_assert(LINES_BYTES >= QG_K_TILE_BYTES + W_LINE - W_UNIT && QG_K_TILE_BYTES % W_UNIT == 0, "a k-tile is in its lines");
static_assert(K_TILE_K_BLOCKS == STAGE_K_BLOCKS, "a stage is a k-tile");
// Those of a stage, where TMA's swizzle begins anew.
constexpr u32 W_STAGE_BYTES = (W_ROW_TILES * LINES_BYTES + 1023) / 1024 * 1024;

// Where k-tile `k` of a row tile lies.
struct KTileLines {
    // Whether the map of last k-tiles has it (`TmaFp8GemmParams::w_last_map`), where row tiles are no whole lines. Its first line in the map.
    // Units from there to its codes.
    bool is_last;
    u32 line, unit;

    QG_DEVICE KTileLines of(u32 k, u32 k_tiles) {
        const u32 units = k * (QG_K_TILE_BYTES / W_UNIT), of_line = W_LINE / W_UNIT;
        if (k + 1 == k_tiles && k_tiles * QG_K_TILE_BYTES % W_LINE != 0) return {true, 0, (LINES_BYTES - QG_K_TILE_BYTES) / W_UNIT};
        return {false, units / of_line, units % of_line};
    }
};

// The scale of the first or the second eight rows of a row tile in a stage: TMA has exchanged bits of its place.
QG_DEVICE float w_scale(const u8* stage, u32 row_tile, u32 unit, u32 eight) {
    const u32 place = row_tile * LINES_BYTES + unit * W_UNIT + QG_SCALE_OFFSET + eight * 4;
    return ld_shared(reinterpret_cast<const float*>(stage + (place ^ place / W_LINE % 8 * W_UNIT)));
}
