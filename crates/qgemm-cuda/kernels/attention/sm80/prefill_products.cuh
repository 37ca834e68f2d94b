// Prefill with cp.async:
// S = Q · Kᵀ and O += P · V.
// A K or V fragment serves
// both row tiles of a warp.
#pragma once
#include "atoms/ldmatrix.cuh"
#include "atoms/mma.cuh"
#include "attention/sm80/prefill_work.cuh"

QG_DEVICE void multiply_add(float* d, const u32 (&a)[4], u32 b0, u32 b1) {
    float(&four)[4] = *reinterpret_cast<float(*)[4]>(d);
    const u32 b[2] = {b0, b1};
    if constexpr (QG_KV == DTYPE_BF16)
        mma_m16n8k16_bf16(four, a, b);
    else
        mma_m16n8k16_f16(four, a, b);
}

QG_DEVICE void multiply_keys(float (&scores)[ROW_TILES][SCORES], const SharedStorage& shared) {
    const u32 lane = thread_index() % 32, warp = thread_index() / 32;
    const u32 q = shared_address(shared.q) + (warp * WARP_ROWS + lane % 16) * QK_PITCH;
    const u32 k = shared_address(shared.k) + (lane / 16 * 8 + lane % 8) * QK_PITCH;
#pragma unroll
    for (u32 step = 0; step < QG_QK / MMA_K; step++) {
        const u32 q_chunk = ((step * 2 + lane / 16) ^ (lane & 7u)) * 16;
        const u32 k_chunk = ((step * 2 + lane / 8 % 2) ^ (lane & 7u)) * 16;
        u32 a[ROW_TILES][4];
#pragma unroll
        for (u32 row = 0; row < ROW_TILES; row++) ldmatrix_x4(a[row], q + q_chunk + row * 16 * QK_PITCH);
#pragma unroll
        for (u32 n = 0; n < QG_KEYS / MMA_N; n += 2) {
            u32 b[4];
            ldmatrix_x4(b, k + k_chunk + n * MMA_N * QK_PITCH);
#pragma unroll
            for (u32 row = 0; row < ROW_TILES; row++) {
                multiply_add(&scores[row][n * 4], a[row], b[0], b[1]);
                multiply_add(&scores[row][n * 4 + 4], a[row], b[2], b[3]);
            }
        }
    }
}

QG_DEVICE void multiply_values(Rows& rows, const u32 (&weights)[ROW_TILES][QG_KEYS / MMA_K][4],
                               const SharedStorage& shared) {
    const u32 lane = thread_index() % 32;
    const u32 v = shared_address(shared.v) + lane % 16 * V_PITCH;
#pragma unroll
    for (u32 step = 0; step < QG_KEYS / MMA_K; step++) {
#pragma unroll
        for (u32 n = 0; n < QG_V / MMA_N; n += 2) {
            u32 b[4];
            ldmatrix_x4_trans(b, v + ((n + lane / 16) ^ (lane & 7u)) * 16 + step * MMA_K * V_PITCH);
#pragma unroll
            for (u32 row = 0; row < ROW_TILES; row++) {
                multiply_add(&rows.sums[row][n * 4], weights[row][step], b[0], b[1]);
                multiply_add(&rows.sums[row][n * 4 + 4], weights[row][step], b[2], b[3]);
            }
        }
    }
}
