// Linear attention: loads the query and key of a token.
// Computes their factors: the inverse L2 norms,
// and for queries the scale.
#pragma once
#include "recurrence/problem.cuh"

QG_DEVICE float warp_sum_of(float value) {
#pragma unroll
    for (u32 mask = 16; mask > 0; mask /= 2) value += shfl_xor(value, mask);
    return value;
}

QG_DEVICE void store_eight(float* to, const float (&v)[8]) {
    st_shared(reinterpret_cast<f32x4*>(to), f32x4{v[0], v[1], v[2], v[3]});
    st_shared(reinterpret_cast<f32x4*>(to) + 1, f32x4{v[4], v[5], v[6], v[7]});
}

// A lane's share of a warp: eight columns.
struct QueryAndKey {
    float q[8], k[8];
    // Factors of the query and the key, and their product
    // with both factors.
    float q_factor, k_factor, qk;

    QG_DEVICE void load_eight_of(const LinearAttentionParams& p, u32 key_head, u32 token, u32 column, float (&q)[8],
                                 float (&k)[8]) {
        using Stored = Eight<QG_X_DTYPE>;
        Stored stored_q = Stored::zeros(), stored_k = Stored::zeros();
        if (column < p.shape.qk_dim) {
            const bool aligned = p.shape.flags & QG_FLAG_X_ALIGNED16;
            const u64 of_q = token * p.at.q_token + key_head * p.at.q_head + column;
            const u64 of_k = token * p.at.k_token + key_head * p.at.k_head + column;
            stored_q = Stored::load(reinterpret_cast<const u8*>(p.at.q) + Stored::offset_of(of_q), aligned);
            stored_k = Stored::load(reinterpret_cast<const u8*>(p.at.k) + Stored::offset_of(of_k), aligned);
        }
#pragma unroll
        for (u32 j = 0; j < 8; j++) q[j] = Stored::number(stored_q, j), k[j] = Stored::number(stored_k, j);
    }

    // For all lanes of a warp.
    QG_DEVICE QueryAndKey load(const LinearAttentionParams& p, u32 key_head, u32 token) {
        QueryAndKey of;
        load_eight_of(p, key_head, token, thread_index() % 32 * 8, of.q, of.k);
        float qq = 0.0f, kk = 0.0f, qk = 0.0f;
#pragma unroll
        for (u32 j = 0; j < 8; j++)
            qq = fma_f32(of.q[j], of.q[j], qq), kk = fma_f32(of.k[j], of.k[j], kk), qk = fma_f32(of.q[j], of.k[j], qk);
        of.q_factor = p.shape.scale, of.k_factor = 1.0f;
        if (p.shape.flags & QG_FLAG_L2_NORM) {
            of.q_factor = of.q_factor / sqrt_f32(warp_sum_of(qq) + p.shape.epsilon);
            of.k_factor = 1.0f / sqrt_f32(warp_sum_of(kk) + p.shape.epsilon);
        }
        of.qk = warp_sum_of(qk) * of.q_factor * of.k_factor;
        return of;
    }

    // Stores query and key times their factors, at eight columns of a row.
    QG_DEVICE void store(QueryAndKey& of, float* q, float* k) {
#pragma unroll
        for (u32 j = 0; j < 8; j++) of.q[j] *= of.q_factor, of.k[j] *= of.k_factor;
        store_eight(q, of.q);
        store_eight(k, of.k);
    }
};
