// Matmul epilogue of a warp, through shared memory.
// Sixteen rows pass at a time, so that neighbouring lanes
// store neighbouring runs.
#pragma once
#include "atoms/warp.cuh"
#include "epilogue/matmul_store.cuh"
#include "mainloop/matmul_accumulators.cuh"

constexpr u32 TILE_PADDING = QG_VARIANT >= 75 ? 8 : 4;

struct MatmulStaging {
    // Padding: the rows that half a warp writes use different banks.
    static constexpr u32 PITCH = WARP_N + TILE_PADDING;
    alignas(16) float acc[16 * PITCH];  // [row][column]
};

QG_DEVICE void store_matmul_tile(const Accumulators& acc, const MatmulParams& p, const MatmulTile& t,
                                 MatmulStaging& staging, u32 warp, u32 lane) {
    constexpr u32 RUNS = WARP_N / RUN;
    const u32 first_row = t.row + warp / QG_WARPS_N * WARP_M, first_column = t.column + warp % QG_WARPS_N * WARP_N;
#pragma unroll
    for (u32 i = 0; i < M_TILES; i++) {
        warp_barrier();
#pragma unroll
        for (u32 j = 0; j < N_TILES; j++)
#pragma unroll
            for (u32 pair = 0; pair < TILE_SUMS / 2; pair++)
                st_shared(reinterpret_cast<f32x2*>(
                              &staging.acc[LaneCoordinates::tile_row(pair, lane) * MatmulStaging::PITCH +
                                           LaneCoordinates::columns_after(j, pair) + LaneCoordinates::first_column(lane)]),
                          f32x2{acc.value[i][j][pair * 2], acc.value[i][j][pair * 2 + 1]});
        warp_barrier();
#pragma unroll
        for (u32 r = lane; r < 16 * RUNS; r += 32) {
            const u32 row = r / RUNS, run = r % RUNS;
            float v[RUN];
#pragma unroll
            for (u32 e = 0; e < RUN; e += 4) {
                const f32x4 four =
                    ld_shared(reinterpret_cast<const f32x4*>(&staging.acc[row * MatmulStaging::PITCH + run * RUN + e]));
                v[e] = four.x, v[e + 1] = four.y, v[e + 2] = four.z, v[e + 3] = four.w;
            }
            store_matmul_run(p, t.product, LaneCoordinates::row_from(first_row, i, row), first_column + run * RUN, v);
        }
    }
}
