// Decode attention: rows of a lane, and the online softmax of
// a tile of their keys.
#pragma once
#include "attention/qk.cuh"
#include "attention/sm80/decode_tile.cuh"

// Accumulators and softmax state of a lane's two rows.
struct LaneRows {
    float sums[SUM_TILES][4];
    float row_max[2], row_sum[2];
    // Without a soft cap, the softmax applies the factor to
    // exponents. Otherwise `bounded` needs scaled scores.
    float key_product_factor, factor;
    bool has_plain_scores;

    QG_DEVICE LaneRows of(const KernelParams& p, u32 kv_head) {
        LaneRows rows = {};
        rows.row_max[0] = rows.row_max[1] = minus_infinity();
        rows.key_product_factor = key_factor(p, kv_head) / CodeRows::KEY_UNIT;
        rows.has_plain_scores = !(p.shape.flags & QG_FLAG_SOFT_CAP) && rows.key_product_factor > 0.0f;
        rows.factor = rows.has_plain_scores ? rows.key_product_factor : 1.0f;
        return rows;
    }
};

// Online softmax step: masks scores, turns them
// into probabilities and rescales the accumulators.
template <class IsVisible>
QG_DEVICE void softmax_step(LaneRows& rows, float (&scores)[SCORE_TILES][4], const KernelParams& p, const IsVisible& is_visible,
                            bool is_mixed, u32 present) {
    if (!rows.has_plain_scores) {
#pragma unroll
        for (u32 n = 0; n < SCORE_TILES; n++) {
#pragma unroll
            for (u32 i = 0; i < 4; i++) scores[n][i] = bounded(p, scores[n][i] * rows.key_product_factor);
        }
    }
    if (is_mixed || present != ALL_PRESENT) {
#pragma unroll
        for (u32 n = 0; n < SCORE_TILES; n++) {
#pragma unroll
            for (u32 i = 0; i < 4; i++) {
                const u32 column = n * TILE_KEYS + lane_key(i);
                if (!is_visible(row_of(i), column) || !(present >> column & 1u)) scores[n][i] = minus_infinity();
            }
        }
    }
    float rescale[2];
    online_softmax(scores, rescale, rows.row_max, rows.row_sum, rows.factor);
    // row_max seldom changes.
    if (ballot(rescale[0] != 1.0f || rescale[1] != 1.0f) != 0) {
#pragma unroll
        for (u32 n = 0; n < SUM_TILES; n++) {
#pragma unroll
            for (u32 i = 0; i < 4; i++) rows.sums[n][i] *= rescale[row_of(i)];
        }
    }
}
