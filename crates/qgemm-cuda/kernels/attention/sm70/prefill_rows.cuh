// Prefill: rows of a lane, the online softmax of a tile, and
// the end of the rows.
#pragma once
#include "attention/finish.cuh"
#include "attention/qk.cuh"
#include "attention/sm70/prefill_tile.cuh"

// Accumulators and softmax state of a lane's queries.
struct Rows {
    float sums[ROW_TILES * FEATURE_TILES][TILE_SUMS];
    float row_max[LANE_ROWS], row_sum[LANE_ROWS];
};

// First query of the lane in its CTA.
QG_DEVICE u32 first_row() {
    return thread_index() / 32 * WARP_ROWS + Fragments::first_row(thread_index() % 32);
}

#if QG_VARIANT < 75
// Visible keys of the lane's rows, recomputed on use to
// save registers. Only mixed tiles, which are few, use it.
struct VisibleKeys {
    const AttentionParams& p;
    const Sequence& s;
    u32 first_query, own_row, last_query;

    __device__ __forceinline__ KeyRange operator[](u32 row) const {
        return visible_keys(p, s, least(first_query + own_row + Fragments::rows_below(row), last_query));
    }
};
#endif

// Online softmax of a tile: masks the scores, turns them
// into weights, and rescales the accumulators.
template <class IsHidden>
QG_DEVICE void softmax_step(Rows& rows, float (&scores)[ROW_TILES * KEY_TILES][TILE_SUMS], const AttentionParams& p,
                            float factor, const IsHidden& is_hidden) {
    float next_max[LANE_ROWS] = {rows.row_max[0], rows.row_max[1]};
#pragma unroll
    for (u32 row = 2; row < LANE_ROWS; row++) next_max[row] = rows.row_max[row];
#pragma unroll
    for (u32 n = 0; n < ROW_TILES * KEY_TILES; n++) {
#pragma unroll
        for (u32 i = 0; i < TILE_SUMS; i++) {
            float& score = scores[n][i];
            const u32 row = Fragments::row_of<KEY_TILES>(n, i);
            score = bounded(p, score * factor);
            if (is_hidden(n, i)) score = minus_infinity();
            next_max[row] = score > next_max[row] ? score : next_max[row];
        }
    }
    float rescale[LANE_ROWS], base[LANE_ROWS];
#pragma unroll
    for (u32 row = 0; row < LANE_ROWS; row++) {
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
            const float other = shfl_xor(next_max[row], Fragments::SAME_ROWS[i]);
            next_max[row] = other > next_max[row] ? other : next_max[row];
        }
        // Avoid (−inf) − (−inf) = NaN when a row is fully masked.
        base[row] = next_max[row] == minus_infinity() ? 0.0f : next_max[row];
        rescale[row] = ex2_approx(rows.row_max[row] - base[row]);
        rows.row_max[row] = next_max[row];
        rows.row_sum[row] *= rescale[row];
    }
#pragma unroll
    for (u32 n = 0; n < ROW_TILES * KEY_TILES; n++) {
#pragma unroll
        for (u32 i = 0; i < TILE_SUMS; i++) {
            const u32 row = Fragments::row_of<KEY_TILES>(n, i);
            scores[n][i] = ex2_approx(scores[n][i] - base[row]);
            rows.row_sum[row] += scores[n][i];
        }
    }
#pragma unroll
    for (u32 n = 0; n < ROW_TILES * FEATURE_TILES; n++) {
#pragma unroll
        for (u32 i = 0; i < TILE_SUMS; i++) rows.sums[n][i] *= rescale[Fragments::row_of<FEATURE_TILES>(n, i)];
    }
}

// Normalizes the lane's rows and stores them.
QG_DEVICE void store_rows(Rows& rows, const AttentionParams& p, const Sequence& s, u32 head, u32 first_query, u32 last_query) {
    const u32 lane = thread_index() % 32, own_row = first_row();
    u8* d = reinterpret_cast<u8*>(p.at.d);
#pragma unroll
    for (u32 own = 0; own < LANE_ROWS; own++) {
#pragma unroll
        for (u32 i = 0; i < 2; i++) rows.row_sum[own] += shfl_xor(rows.row_sum[own], Fragments::SAME_ROWS[i]);
        const u32 query = first_query + own_row + Fragments::rows_below(own);
        if (query > last_query) continue;
        const RowEnd end = end_of_row(p, head, rows.row_max[own], rows.row_sum[own], 1.0f);
        const u64 token = s.token + query;
        u8* row = d + (token * p.at.d_token + head * p.at.d_head) * 2;
#pragma unroll
        for (u32 tile = 0; tile < FEATURE_TILES; tile++) {
#pragma unroll
            for (u32 first = 0; first < TILE_SUMS; first += 4) {
                const u32 n = own / 2 * FEATURE_TILES + tile, i = own % 2 * 2 + first;
                const u32 column = Fragments::feature_of(n, i, lane);
                if (column >= p.shape.v_dim) continue;
                const u32 pair = rounded_pair(rows.sums[n][i] * end.scale, rows.sums[n][i + 1] * end.scale);
                if (p.shape.flags & QG_FLAG_D_ALIGNED) {
                    st_global_u32(row + column * 2, pair);
                } else {
                    st_global_u16(row + column * 2, pair);
                    st_global_u16(row + column * 2 + 2, pair >> 16);
                }
            }
        }
        if ((lane & (Fragments::SAME_ROWS[0] | Fragments::SAME_ROWS[1])) == 0) store_lse(p, token, head, end);
    }
}
