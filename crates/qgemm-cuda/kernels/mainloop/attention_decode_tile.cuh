// How a tile of scores, and sums of values, of attention of few queries lie in the lanes of a warp, and how scores become weights.
#pragma once
#include "atoms/exp2.cuh"
#include "atoms/max.cuh"
#include "mainloop/attention_decode_work.cuh"

constexpr u32 MMA_K = 16, MMA_N = 8;
constexpr u32 V_TILES = QG_V / MMA_N, SUM_PITCH = QG_V + 4;
// Of eight rows, tiles of scores are those of sixteen keys by eight rows, and tiles of sums sixteen features by eight rows, so that no half
// of a tile is empty where groups of heads are small; otherwise, sixteen rows by eight keys or features.
static_assert(ROWS == 16 || IS_TURNED, "scores and sums are laid out for eight rows or sixteen");
constexpr u32 TILE_KEYS = IS_TURNED ? 16 : 8, SCORE_TILES = TILE / TILE_KEYS, SUM_TILES = IS_TURNED ? V_TILES / 2 : V_TILES;
// Of a tile, a lane has four scores and four sums, of two rows. This says which of both number `i` is of.
QG_DEVICE constexpr u32 row_of(u32 i) {
    return IS_TURNED ? i % 2 : i / 2;
}
// Which row of the CTA the first or second of them is.
QG_DEVICE u32 lane_row(u32 i) {
    const u32 lane = thread_index() % 32;
    return IS_TURNED ? lane % 4 * 2 + i : lane / 4 + 8 * i;
}
// Which key of a tile score `i` is of.
QG_DEVICE u32 lane_key(u32 i) {
    const u32 lane = thread_index() % 32;
    return IS_TURNED ? lane / 4 + i / 2 * 8 : lane % 4 * 2 + i % 2;
}
// Which feature sum `i` of tile `m` is of; sums 0 and 2, or 1 and 3, of codes are of neighbours.
QG_DEVICE u32 lane_feature(u32 m, u32 i) {
    const u32 g = thread_index() % 32 / 4, t = thread_index() % 4;
    if constexpr (!IS_TURNED) return m * MMA_N + t * 2 + i % 2;
    if constexpr (!IS_CODES) return m * 16 + g + i / 2 * 8;
    if constexpr (QG_KV == KV_Q8_0) return m * 16 + g * 2 + i / 2;
    if constexpr (QG_KV == KV_Q4_0) return m / 2 * 32 + g * 4 + m % 2 * 2 + i / 2;
    return g * V_TILES + m * 2 + i / 2;
}
// Lanes that have scores of the same rows differ in these bits.
constexpr u32 FIRST_PEER = IS_TURNED ? 4 : 1, LAST_PEER = IS_TURNED ? 16 : 2;

// What a warp leaves for the others, in the place of its ring.
struct WarpResult {
    float sums[ROWS][SUM_PITCH];
    // The largest exponent of each row and the sum of its weights.
    f32x2 stats[ROWS];
};
static_assert(sizeof(WarpResult) <= RING_BYTES, "results take the place of the ring");

// Scores become weights: powers of 2 of their products with `factor`, which is positive, less those of the largest so far. What sums so far
// are multiplied with is `kept`, which is 1 where the largest stays; `total` is the lane's share of the sum of weights.
QG_DEVICE void weigh(float (&scores)[SCORE_TILES][4], float (&kept)[2], float (&largest)[2], float (&total)[2], float factor) {
    // Two chains a row.
    float above[2][2] = {{largest[0], minus_infinity()}, {largest[1], minus_infinity()}};
#pragma unroll
    for (u32 n = 0; n < SCORE_TILES; n++) {
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            float& of_chain = above[row_of(i)][IS_TURNED ? i / 2 : i % 2];
            of_chain = max_f32(scores[n][i], of_chain);
        }
    }
    float base[2];
#pragma unroll
    for (u32 row = 0; row < 2; row++) {
        float next = max_f32(above[row][0], above[row][1]);
#pragma unroll
        for (u32 peer = FIRST_PEER; peer <= LAST_PEER; peer *= 2) next = max_f32(shfl_xor(next, peer), next);
        // Of minus infinities no power is taken of a difference of two.
        base[row] = next == minus_infinity() ? 0.0f : next * factor;
        // The products of the same largest are the same, so that their difference is nothing.
        kept[row] = ex2_approx(largest[row] * factor - base[row]);
        base[row] -= WEIGHT_EXPONENT;
        largest[row] = next;
        total[row] *= kept[row];
    }
#pragma unroll
    for (u32 n = 0; n < SCORE_TILES; n++) {
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            scores[n][i] = ex2_approx(fma_f32(scores[n][i], factor, -base[row_of(i)]));
            total[row_of(i)] += scores[n][i];
        }
    }
}
