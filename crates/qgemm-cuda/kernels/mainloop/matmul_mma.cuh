// `matmul` of 16-bit operands on MMA.
#pragma once
#include "atoms/mma.cuh"
#include "mainloop/matmul_tiles.cuh"

static_assert(QG_DTYPE == DTYPE_F16 || QG_VARIANT >= 80, "bf16 has instructions from Ampere on");

struct MmaStage {
    alignas(128) u8 a[TileA::BYTES];  // [row][k] or [k][row]
    alignas(128) u8 b[TileB::BYTES];  // [column][k] or [k][column]
};

QG_DEVICE void multiply_16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
#if QG_VARIANT >= 80
    const u32 b[2] = {b0, b1};
    if constexpr (QG_DTYPE == DTYPE_F16)
        mma_m16n8k16_f16(d, a, b);
    else
        mma_m16n8k16_bf16(d, a, b);
#else
    const u32 low[2] = {a[0], a[1]}, high[2] = {a[2], a[3]};
    mma_m16n8k8_f16(d, low, b0);
    mma_m16n8k8_f16(d, high, b1);
#endif
}

// Adds the products of a stage.
QG_DEVICE void multiply_stage(Accumulators& acc, const MmaStage& stage, u32 warp, u32 lane) {
    const u32 row = warp / QG_WARPS_N * WARP_M, column = warp % QG_WARPS_N * WARP_N;
#pragma unroll
    for (u32 step = 0; step < K_STEPS; step++) {
        u32 a[M_TILES][4], b[N_TILES / 2][4];
#pragma unroll
        for (u32 j = 0; j < N_TILES / 2; j++) load_b(b[j], stage.b, column + j * 16, step * 16, lane);
#pragma unroll
        for (u32 i = 0; i < M_TILES; i++) load_a(a[i], stage.a, row + i * 16, step * 16, lane);
#pragma unroll
        for (u32 i = 0; i < M_TILES; i++)
#pragma unroll
            for (u32 j = 0; j < N_TILES; j++)
                multiply_16(acc.value[i][j], a[i], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
    }
}
