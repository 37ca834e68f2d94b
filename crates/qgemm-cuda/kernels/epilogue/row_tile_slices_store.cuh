// Epilogue of a row tile whose K slices are one warp each.
#pragma once
#include "epilogue/sliced_k.cuh"

static_assert(CTA_ROWS == QG_TILE_ROWS, "all warps have the same row tile");

// Accumulators of all slices.
struct RowTileSums {
    WarpAccumulators of_slice[SLICES];
};

// Whether outputs are only scaled by alpha or a row scale.
QG_DEVICE bool is_plain_row_tile(const GemmParams& p) {
    constexpr u32 OTHERS = QG_FLAG_BIAS | (Operands::HAS_SCALE ? QG_FLAG_ROW_SCALE : 0);
    return is_plain(p) && !(p.shape.flags & OTHERS);
}

// All threads of the CTA call it after a barrier that follows
// the last `put`. `plain` is `is_plain_row_tile`.
QG_DEVICE void store_row_tile_slices(const GemmParams& p, bool plain, const RowTileSums& sums, u32 n_tile, u32 thread) {
    const u32 first_row = n_tile * CTA_ROWS;
    const auto accumulators_of = [&](u32 i) -> const WarpAccumulators& { return sums.of_slice[i]; };
    if (plain && first_row + CTA_ROWS <= p.shape.out_features) {
        store_products<false>(p, 0, first_row, nullptr, thread, accumulators_of);
        return;
    }
    store_runs<QG_X_ROWS, CTA_ROWS, QG_THREADS, WIDTH>(p, 0, first_row, thread, [&](u32 token, u32 run, float (&acc)[WIDTH]) {
        reduce_slices(acc, token, run * WIDTH, accumulators_of);
    });
}
