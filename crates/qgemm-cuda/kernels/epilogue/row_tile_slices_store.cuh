// From the accumulators of a row tile's slices of K, one a warp, to D.
#pragma once
#include "epilogue/sliced_k.cuh"

static_assert(CTA_ROWS == QG_TILE_ROWS, "all warps have the same row tile");

// The accumulators of all slices.
struct RowTileSums {
    WarpAccumulators of_slice[SLICES];
};

// Whether outputs need nothing but a factor.
QG_DEVICE bool is_plain_row_tile(const GemmParams& p) {
    constexpr u32 OTHERS = QG_FLAG_BIAS | (Operands::HAS_SCALE ? QG_FLAG_ROW_SCALE : 0);
    return is_plain(p) && !(p.shape.flags & OTHERS);
}

// For the whole CTA, after a barrier behind the last `put`; `plain` as `is_plain_row_tile` says. Plain outputs have code of their own
// here as they have in `epilogue/sliced_k.cuh`.
QG_DEVICE void store_row_tile_slices(const GemmParams& p, bool plain, const RowTileSums& sums, u32 n_tile, u32 thread) {
    constexpr u32 RUNS = QG_TILE_ROWS / WIDTH;
    static_assert(QG_X_ROWS * RUNS <= QG_THREADS, "a thread has one run");
    const u32 first_row = n_tile * QG_TILE_ROWS;
    const auto accumulators_of = [&](u32 i) -> const WarpAccumulators& { return sums.of_slice[i]; };
    if (!plain || first_row + QG_TILE_ROWS > p.shape.out_features) {
        store_runs<QG_X_ROWS, QG_TILE_ROWS, QG_THREADS, WIDTH>(
            p, 0, first_row, thread,
            [&](u32 token, u32 run, float (&acc)[WIDTH]) { reduce_slices(acc, token, run * WIDTH, accumulators_of); });
        return;
    }
    const u32 token = thread / RUNS, row = thread % RUNS * WIDTH;
    if (token >= QG_X_ROWS || token >= p.shape.m) return;
    float v[WIDTH], scale[WIDTH] = {p.shape.alpha, p.shape.alpha};
    reduce_slices(v, token, row, accumulators_of);
    if constexpr (!Operands::HAS_SCALE) {
        if (p.shape.flags & QG_FLAG_ROW_SCALE) {
            load_dense_run(scale, DTYPE_F32, p.at.row_scale, first_row + row, true, WIDTH);
            scale[0] *= p.shape.alpha, scale[1] *= p.shape.alpha;
        }
    }
    v[0] *= scale[0], v[1] *= scale[1];
    store_dense_run(QG_X_DTYPE, p.at.d, token * p.at.d_row + first_row + row, true, WIDTH, v);
}
