// Block-scaled `matmul`: each block of K has separate sums.
// They are added to the total, times both scales.
#pragma once
#include "atoms/numeric.cuh"
#include "mainloop/matmul_accumulators.cuh"
#include "sched/matmul_tile.cuh"

// Scales of one block for a lane's accumulators:
// two rows per tile, and the lane's columns.
struct LaneScales {
    static constexpr u32 COLUMNS = TILE_COLUMNS / 4;
    float a[M_TILES][2], b[N_TILES][COLUMNS];

    QG_DEVICE void load(LaneScales& s, const MatmulParams& p, const MatmulTile& t, u32 block, u32 warp, u32 lane) {
        const u32 row = t.row + warp / QG_WARPS_N * WARP_M + LaneCoordinates::first_row(lane);
        const u32 column = t.column + warp % QG_WARPS_N * WARP_N + LaneCoordinates::first_column(lane);
        const u8 *of_a = block_scales(p.at.a_scale, t), *of_b = block_scales(p.at.b_scale, t);
#pragma unroll
        for (u32 i = 0; i < M_TILES; i++)
#pragma unroll
            for (u32 half = 0; half < 2; half++)
                s.a[i][half] = one(of_a, p.scales.a_row, row + LaneCoordinates::rows_below(i, half), p.shape.m, block);
#pragma unroll
        for (u32 j = 0; j < N_TILES; j++)
#pragma unroll
            for (u32 e = 0; e < COLUMNS; e++)
                s.b[j][e] = one(of_b, p.scales.b_row, column + LaneCoordinates::columns_after(j, e / 2 * 2) + e % 2, p.shape.n, block);
    }

    // 0 for rows and columns outside D.
    QG_DEVICE float one(const u8* scales, u64 row_stride, u32 outer, u32 outer_len, u32 block) {
        return outer < outer_len ? bits_to_f32(ld_global_u32(scales + (outer * row_stride + block) * 4)) : 0.0f;
    }
};

// Adds a block's scaled sums to the total and clears them.
QG_DEVICE void add_block(Accumulators& all, Accumulators& sums, const LaneScales& s) {
#pragma unroll
    for (u32 i = 0; i < M_TILES; i++)
#pragma unroll
        for (u32 j = 0; j < N_TILES; j++)
#pragma unroll
            for (u32 e = 0; e < TILE_SUMS; e++) {
                const float of_row = s.a[i][e / 2 % 2], of_column = s.b[j][e / 4 * 2 + e % 2];
                all.value[i][j][e] = fma_f32(sums.value[i][j][e] * of_row, of_column, all.value[i][j][e]);
                sums.value[i][j][e] = 0.0f;
            }
}
