// f32 `matmul` as three bf16 products (bf16x3).
// x = hi + lo, each rounded to nearest; a · b = hi · hi +
// hi · lo + lo · hi.
// Values are split once, on the way to shared memory.
// hi and lo have a tile each, so `ldmatrix` works for either
// order of the tile.
#pragma once
#include "atoms/mma.cuh"
#include "dequant/bf16_split.cuh"
#include "mainloop/matmul_tiles.cuh"

static_assert(QG_VARIANT >= 80, "bf16 has instructions from Ampere on");

struct MmaStage {
    // The hi tile, then the lo tile.
    alignas(128) u8 a[2 * TileA::BYTES];
    alignas(128) u8 b[2 * TileB::BYTES];
};

// Adds the products of a stage. The MMA adds 16 values along
// K, small products first. f32 additions combine these sums:
// they round to nearest, while the MMA truncates.
QG_DEVICE void multiply_stage(Accumulators& acc, const MmaStage& stage, u32 warp, u32 lane) {
    const u32 row = warp / QG_WARPS_N * WARP_M, column = warp % QG_WARPS_N * WARP_N;
    // Not unrolled: the next step's fragments would not
    // fit in registers.
#pragma unroll 1
    for (u32 step = 0; step < K_STEPS; step++) {
        u32 b_hi[N_TILES / 2][4], b_lo[N_TILES / 2][4];
#pragma unroll
        for (u32 j = 0; j < N_TILES / 2; j++) {
            load_b(b_hi[j], stage.b, column + j * 16, step * 16, lane);
            load_b(b_lo[j], stage.b + TileB::BYTES, column + j * 16, step * 16, lane);
        }
#pragma unroll
        for (u32 i = 0; i < M_TILES; i++) {
            u32 a_hi[4], a_lo[4];
            load_a(a_hi, stage.a, row + i * 16, step * 16, lane);
            load_a(a_lo, stage.a + TileA::BYTES, row + i * 16, step * 16, lane);
#pragma unroll
            for (u32 j = 0; j < N_TILES; j++) {
                const u32 hi[2] = {b_hi[j / 2][j % 2 * 2], b_hi[j / 2][j % 2 * 2 + 1]};
                const u32 lo[2] = {b_lo[j / 2][j % 2 * 2], b_lo[j / 2][j % 2 * 2 + 1]};
                float sum[4] = {};
                mma_m16n8k16_bf16(sum, a_lo, hi);
                mma_m16n8k16_bf16(sum, a_hi, lo);
                mma_m16n8k16_bf16(sum, a_hi, hi);
#pragma unroll
                for (u32 d = 0; d < 4; d++) acc.value[i][j][d] += sum[d];
            }
        }
    }
}
