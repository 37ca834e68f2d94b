// X block sums of a CTA's tokens in shared memory, computed
// once for all rows of W.
// Computed per row tile, they would double the MMAs and delay
// the first product.
#pragma once
#include "mainloop/k_tile_product.cuh"

constexpr bool HAS_X_SUM_TABLE = NEEDS_X_BLOCK_SUMS;
// Partials of a k-tile.
constexpr u32 K_TILE_PARTIALS = SPANS * SPAN_PARTIALS;

// X block sums of a k-tile.
struct XSumTable {
    alignas(8) float value[K_TILE_PARTIALS][QG_TILE_M];  // [partial][token]

    // All warps compute the tables, interleaved by k-tile.
    QG_DEVICE void make(XSumTable* tables, const XStage* x, u32 k_tiles, const XCursor& cursor, u32 warp, u32 warps, u32 lane) {
        const Constants constants = Constants::make(lane);
#pragma unroll 1
        for (u32 k_tile = warp; k_tile < k_tiles; k_tile += warps) {
#pragma unroll
            for (u32 span = 0; span < SPANS; span++) {
                XSpan operands;
                XSpan::load(operands, x + k_tile * K_BLOCKS + span * SPAN_K_BLOCKS, cursor);
#pragma unroll
                for (u32 partial = 0; partial < SPAN_PARTIALS; partial++)
#pragma unroll
                    for (u32 tt = 0; tt < TOKEN_TILES; tt++) {
                        // All rows are equal.
                        const XBlockSum sum = XBlockSum::of(constants, operands.b[tt], partial);
                        float* const to = &tables[k_tile].value[span * SPAN_PARTIALS + partial][tt * MMA_TOKENS + lane % 4 * 2];
                        if (lane < 4) st_shared(to, sum.value[0]), st_shared(to + 1, sum.value[1]);
                    }
            }
        }
    }

    QG_DEVICE XBlockSum of(const XSumTable& table, u32 tt, u32 sub, u32 lane) {
        const f32x2 v = ld_shared(reinterpret_cast<const f32x2*>(&table.value[sub][tt * MMA_TOKENS + lane % 4 * 2]));
        return {{v.x, v.y, v.x, v.y}};
    }
};
