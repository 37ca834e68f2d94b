// Attention epilogue: stores accumulators to rows of D.
#pragma once
#include "attention/finish.cuh"
#include "attention/online_softmax.cuh"
#include "attention/value_slice.cuh"

// 4 × 4 transpose among four lanes:
// lane t receives word t of each lane.
QG_DEVICE void transpose(u32 (&words)[4], u32 t) {
#pragma unroll
    for (u32 distance = 1; distance <= 2; distance *= 2) {
        const bool is_high = t & distance;
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            if (i & distance) continue;
            u32 &low = words[i], &high = words[i + distance];
            const u32 came = shfl_xor_u32(is_high ? low : high, distance);
            low = is_high ? came : low;
            high = is_high ? high : came;
        }
    }
}

// Stores a query of a head: accumulator row ROW, normalized, and
// its log-sum-exp. `row_max` is a base-2 exponent, `row_sum` the
// lane's partial sum. All lanes of a warp take part.
template <u32 ROW, u32 SUMS>
QG_DEVICE void store_query(const float (&sums)[SUMS], const AttentionParams& p, const Sequence& s, u32 head, u32 query,
                           bool is_present, float row_max, float row_sum) {
    const u32 t = thread_index() % 4;
#pragma unroll
    for (u32 mask = 1; mask <= 2; mask *= 2) row_sum += shfl_xor(row_sum, mask);
    const RowEnd end = end_of_row(p, head, row_max, row_sum, 1.0f);
    const u64 token = s.token + query;
    u8* to = reinterpret_cast<u8*>(p.at.d) + (token * p.at.d_token + head * p.at.d_head + first_feature()) * 2;
    const u64 gate = gate_of(p, token, head) + first_feature();
#pragma unroll
    for (u32 n = 0; n < SUMS / 4; n += 4) {
        // Two adjacent features of each of
        // four lanes become eight of one lane.
        u32 words[4];
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            const u32 pair = (n + i) * 4 + ROW * 2, column = (n + i) * 8 + t * 2;
            float low = sums[pair] * end.scale, high = sums[pair + 1] * end.scale;
            if (p.at.gate && is_present && column < features_of_cta(p)) multiply_by_gate(p, gate + column, low, high);
            words[i] = rounded_pair(low, high);
        }
        transpose(words, t);
        const u32 column = (n + t) * 8;
        if (!is_present || column >= features_of_cta(p)) continue;
        if (p.shape.flags & QG_FLAG_D_ALIGNED) {
            st_global_v4(to + column * 2, {words[0], words[1], words[2], words[3]});
        } else {
#pragma unroll
            for (u32 i = 0; i < 8; i++) st_global_u16(to + column * 2 + i * 2, words[i / 2] >> (i % 2 * 16));
        }
    }
    if (is_present && t == 0 && first_feature() == 0) store_lse(p, token, head, end);
}
