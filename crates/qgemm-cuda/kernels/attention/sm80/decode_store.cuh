// Decode attention: stores rows of D.
#pragma once
#include "attention/sm80/decode_work.cuh"
#include "attention/finish.cuh"
#include "dequant/halves.cuh"

// Rounds N results to the type of D, which is the
// type of Q, and stores them from `element` on.
template <u32 N>
QG_DEVICE void store_some(const KernelParams& p, u64 element, const float (&d)[N]) {
    u8* to = reinterpret_cast<u8*>(p.at.d) + element * 2;
    u32 pairs[N / 2];
#pragma unroll
    for (u32 i = 0; i < N / 2; i++) pairs[i] = f32_to_halves<QG_X>(d[2 * i], d[2 * i + 1]);
    if (p.shape.flags & QG_FLAG_D_ALIGNED) {
        if constexpr (N == 8) {
            st_global_v4(to, {pairs[0], pairs[1], pairs[2], pairs[3]});
        } else {
#pragma unroll
            for (u32 i = 0; i < N / 2; i++) st_global_u32(to + i * 4, pairs[i]);
        }
        return;
    }
#pragma unroll
    for (u32 i = 0; i < N; i++) st_global_u16(to + i * 2, pairs[i / 2] >> (i % 2 * 16));
}

// Normalizes N columns of a row by `row_sum`
// and stores them from column `c` on.
template <u32 N>
QG_DEVICE void store_row(const KernelParams& p, const SavedWork& work, u32 row, u32 c, const float (&sums)[N], float row_max, float row_sum) {
    if (c >= p.shape.v_dim) return;
    const u64 token = work.token_of(row);
    const u32 head = work.head_of(row);
    const RowEnd end = end_of_row(p, head, row_max, row_sum, work.v_factor);
    float d[N];
#pragma unroll
    for (u32 i = 0; i < N; i++) d[i] = sums[i] * end.scale;
    if (p.at.gate) {
#pragma unroll
        for (u32 i = 0; i < N; i += 2) multiply_by_gate(p, gate_of(p, token, head) + c + i, d[i], d[i + 1]);
    }
    store_some(p, token * p.at.d_token + head * p.at.d_head + c, d);
    if (c == 0) store_lse(p, token, head, end);
}
