// FMA attention: keys and values of a tile for every row.
#pragma once
#include "attention/qk.cuh"
#include "attention/simt/rows.cuh"

// Online softmax step: UNROLL keys and values
// for every row. ALL: every row attends to
// every key. `present`: keys that exist, or
// with a mask the bits of `keys_of_group`.
template <bool ALL>
QG_DEVICE void attend(const AttentionParams& p, RowState (&rows)[QG_ROWS], const KeyEight (&k)[UNROLL][EIGHTS],
                      const ValueEight (&v)[UNROLL][EIGHTS], u32 first_key, u32 present) {
    float scores[QG_ROWS][UNROLL];
#pragma unroll
    for (u32 u = 0; u < UNROLL; u++) {
        float numbers[FEATURES];
#pragma unroll
        for (u32 i = 0; i < FEATURES; i++) numbers[i] = KeyEight::number(k[u][i / 8], i % 8);
#pragma unroll
        for (u32 r = 0; r < QG_ROWS; r++) {
            float sum = 0.0f;
#pragma unroll
            for (u32 i = 0; i < FEATURES; i++) sum = fma_f32(rows[r].q[i], numbers[i], sum);
#pragma unroll
            for (u32 mask = QG_LANES / 2; mask > 0; mask /= 2) sum += shfl_xor(sum, mask);
            scores[r][u] = sum;
        }
    }
    const auto is_visible = [&](u32 r, u32 u) -> bool {
#if QG_BITS
        return present >> (r * UNROLL + u) & 1u;
#else
        const RowState& row = rows[r];
        const u32 key = first_key + u * GROUPS;
        return (present >> u & 1u) && key >= row.visible.first && key < row.visible.end;
#endif
    };
#pragma unroll
    for (u32 r = 0; r < QG_ROWS; r++) {
        RowState& row = rows[r];
        float row_max = row.row_max;
#pragma unroll
        for (u32 u = 0; u < UNROLL; u++) {
            scores[r][u] = bounded(p, scores[r][u]);
            if (!ALL && !is_visible(r, u)) scores[r][u] = minus_infinity();
            row_max = scores[r][u] > row_max ? scores[r][u] : row_max;
        }
        // Avoid (−inf) − (−inf) = NaN when a row is fully masked.
        const float base = row_max == minus_infinity() ? 0.0f : row_max;
        const float rescale = ex2_approx(row.row_max - base);
        row.row_max = row_max;
        row.row_sum *= rescale;
#pragma unroll
        for (u32 u = 0; u < UNROLL; u++) {
            scores[r][u] = ex2_approx(scores[r][u] - base);
            row.row_sum += scores[r][u];
        }
#pragma unroll
        for (u32 i = 0; i < FEATURES; i++) row.sums[i] *= rescale;
    }
#pragma unroll
    for (u32 u = 0; u < UNROLL; u++) {
        float numbers[FEATURES];
#pragma unroll
        for (u32 i = 0; i < FEATURES; i++) numbers[i] = ValueEight::number(v[u][i / 8], i % 8);
#pragma unroll
        for (u32 r = 0; r < QG_ROWS; r++) {
            // 0 · NaN is NaN: skip masked values.
            if (!ALL && !is_visible(r, u)) continue;
#pragma unroll
            for (u32 i = 0; i < FEATURES; i++) rows[r].sums[i] = fma_f32(scores[r][u], numbers[i], rows[r].sums[i]);
        }
    }
}
