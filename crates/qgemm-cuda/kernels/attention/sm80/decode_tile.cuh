// Decode attention: fragment layouts of scores
// and accumulators, and the online softmax.
#pragma once
#include "atoms/exp2.cuh"
#include "atoms/max.cuh"
#include "attention/sm80/decode_work.cuh"

constexpr u32 MMA_K = 16, MMA_N = 8;
constexpr u32 V_TILES = QG_V / MMA_N, SUM_PITCH = QG_V + 4;
// Tile shapes. Eight rows: S is [16 keys][8 rows] and
// O is [16 features][8 rows], so no half of an MMA is
// empty for small GQA groups. Sixteen rows: S is [16
// rows][8 keys] and O is [16 rows][8 features].
static_assert(ROWS == 16 || IS_TRANSPOSED, "scores and sums are laid out for eight rows or sixteen");
constexpr u32 TILE_KEYS = IS_TRANSPOSED ? 16 : 8, SCORE_TILES = TILE / TILE_KEYS, SUM_TILES = IS_TRANSPOSED ? V_TILES / 2 : V_TILES;
// Row of fragment register `i`: 0 or
// 1, because a lane holds two rows.
QG_DEVICE constexpr u32 row_of(u32 i) {
    return IS_TRANSPOSED ? i % 2 : i / 2;
}
// Row of the CTA for the lane's row 0 or 1.
QG_DEVICE u32 lane_row(u32 i) {
    const u32 lane = thread_index() % 32;
    return IS_TRANSPOSED ? lane % 4 * 2 + i : lane / 4 + 8 * i;
}
// Key of score register `i` within its tile.
QG_DEVICE u32 lane_key(u32 i) {
    const u32 lane = thread_index() % 32;
    return IS_TRANSPOSED ? lane / 4 + i / 2 * 8 : lane % 4 * 2 + i % 2;
}
// Feature of accumulator register `i` of tile `m`. Quantized
// V: registers 0 and 2, and 1 and 3, hold adjacent features.
QG_DEVICE u32 lane_feature(u32 m, u32 i) {
    const u32 g = thread_index() % 32 / 4, t = thread_index() % 4;
    if constexpr (!IS_TRANSPOSED) return m * MMA_N + t * 2 + i % 2;
    if constexpr (!IS_CODES) return m * 16 + g + i / 2 * 8;
    if constexpr (QG_KV == KV_Q8_0) return m * 16 + g * 2 + i / 2;
    if constexpr (QG_KV == KV_Q4_0) return m / 2 * 32 + g * 4 + m % 2 * 2 + i / 2;
    return g * V_TILES + m * 2 + i / 2;
}
// Lanes that share rows differ in these bits.
constexpr u32 FIRST_PEER = IS_TRANSPOSED ? 4 : 1, LAST_PEER = IS_TRANSPOSED ? 16 : 2;

// Result of a warp; it overwrites the warp's ring.
struct WarpResult {
    float sums[ROWS][SUM_PITCH];
    // row_max (base-2 exponent) and row_sum of each row.
    f32x2 stats[ROWS];
};
static_assert(sizeof(WarpResult) <= RING_BYTES, "results take the place of the ring");

// Online softmax of a tile: scores become exp2(score
// · factor − row_max · factor). `factor` must be
// positive. `rescale` is exactly 1 if row_max stays;
// `row_sum` is the lane's partial sum.
QG_DEVICE void online_softmax(float (&scores)[SCORE_TILES][4], float (&rescale)[2], float (&row_max)[2], float (&row_sum)[2], float factor) {
    // Two independent chains a row.
    float next_max[2][2] = {{row_max[0], minus_infinity()}, {row_max[1], minus_infinity()}};
#pragma unroll
    for (u32 n = 0; n < SCORE_TILES; n++) {
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            float& of_chain = next_max[row_of(i)][IS_TRANSPOSED ? i / 2 : i % 2];
            of_chain = max_f32(scores[n][i], of_chain);
        }
    }
    float base[2];
#pragma unroll
    for (u32 row = 0; row < 2; row++) {
        float next = max_f32(next_max[row][0], next_max[row][1]);
#pragma unroll
        for (u32 peer = FIRST_PEER; peer <= LAST_PEER; peer *= 2) next = max_f32(shfl_xor(next, peer), next);
        // Avoid (−inf) − (−inf) = NaN when a row is fully masked.
        base[row] = next == minus_infinity() ? 0.0f : next * factor;
        // Not an FMA: an unchanged row_max must give exactly 0.
        rescale[row] = ex2_approx(row_max[row] * factor - base[row]);
        base[row] -= WEIGHT_EXPONENT;
        row_max[row] = next;
        row_sum[row] *= rescale[row];
    }
#pragma unroll
    for (u32 n = 0; n < SCORE_TILES; n++) {
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            scores[n][i] = ex2_approx(fma_f32(scores[n][i], factor, -base[row_of(i)]));
            row_sum[row_of(i)] += scores[n][i];
        }
    }
}
