// Linear attention: a chunk of tokens of a head in shared memory.
#pragma once
#include "recurrence/problem.cuh"

// Rows of a thread, and columns of each,
// in groups of four.
constexpr u32 ROWS = 2, COLUMNS = 16, GROUPS = COLUMNS / 4;

// Position of a thread in a state.
struct Place {
    // Value head, its key head, and first row of the CTA.
    u32 head, key_head, first_row;
    // Lanes of a row, the thread's lane, and rows of the CTA.
    u32 lanes, lane, cta_rows;

    // Row `i` of the thread, from the first row on.
    QG_DEVICE u32 row(const Place& place, u32 i) {
        return (thread_index() + i * QG_THREADS) / place.lanes;
    }
    // First column of a group.
    QG_DEVICE u32 column(const Place& place, u32 group) {
        return (group * place.lanes + place.lane) * 4;
    }
};

struct Chunk {
    // [tokens, pitch]; columns beyond the head's are 0.
    float *k, *q;
    // As keys, or one for each token.
    float* decay;
    // For each token: beta, and the product of query and key.
    float *beta, *qk;
    // [tokens, rows of the CTA].
    float* v;
    u32 pitch;

    QG_DEVICE Chunk of(const LinearAttentionParams& p, const Place& place) {
        const u32 pitch = COLUMNS * place.lanes, tokens = p.shape.chunk;
        float* memory = reinterpret_cast<float*>(dynamic_shared());
        float* per_token = memory + 3 * tokens * pitch;
        return {memory,           memory + tokens * pitch, memory + 2 * tokens * pitch,
                per_token,        per_token + tokens,      per_token + 2 * tokens,
                pitch};
    }
};

QG_DEVICE float warp_sum_of(float value) {
#pragma unroll
    for (u32 mask = 16; mask > 0; mask /= 2) value += shfl_xor(value, mask);
    return value;
}

QG_DEVICE void store_eight(float* to, const float (&v)[8]) {
    st_shared(reinterpret_cast<f32x4*>(to), f32x4{v[0], v[1], v[2], v[3]});
    st_shared(reinterpret_cast<f32x4*>(to) + 1, f32x4{v[4], v[5], v[6], v[7]});
}

// Query and key of a token, by a warp: eight columns a lane.
QG_DEVICE void load_query_and_key(const LinearAttentionParams& p, const Place& place, const Chunk& chunk, u32 i,
                                  u32 token) {
    using Stored = Eight<QG_X_DTYPE>;
    const u32 column = thread_index() % 32 * 8;
    Stored stored_q = Stored::zeros(), stored_k = Stored::zeros();
    if (column < p.shape.qk_dim) {
        const bool aligned = p.shape.flags & QG_FLAG_X_ALIGNED16;
        const u64 q = token * p.at.q_token + place.key_head * p.at.q_head + column;
        const u64 k = token * p.at.k_token + place.key_head * p.at.k_head + column;
        stored_q = Stored::load(reinterpret_cast<const u8*>(p.at.q) + Stored::offset_of(q), aligned);
        stored_k = Stored::load(reinterpret_cast<const u8*>(p.at.k) + Stored::offset_of(k), aligned);
    }
    float q[8], k[8], qq = 0.0f, kk = 0.0f, qk = 0.0f;
#pragma unroll
    for (u32 j = 0; j < 8; j++) {
        q[j] = Stored::number(stored_q, j), k[j] = Stored::number(stored_k, j);
        qq = fma_f32(q[j], q[j], qq), kk = fma_f32(k[j], k[j], kk), qk = fma_f32(q[j], k[j], qk);
    }
    float q_factor = p.shape.scale, k_factor = 1.0f;
    if (p.shape.flags & QG_FLAG_L2_NORM) {
        q_factor = q_factor / sqrt_f32(warp_sum_of(qq) + p.shape.epsilon);
        k_factor = 1.0f / sqrt_f32(warp_sum_of(kk) + p.shape.epsilon);
    }
    qk = warp_sum_of(qk);
    if (column == 0) st_shared(&chunk.qk[i], qk * q_factor * k_factor);
    if (column >= chunk.pitch) return;
#pragma unroll
    for (u32 j = 0; j < 8; j++) q[j] *= q_factor, k[j] *= k_factor;
    store_eight(&chunk.q[i * chunk.pitch + column], q);
    store_eight(&chunk.k[i * chunk.pitch + column], k);
}

// Loads `count` tokens from `first` on.
QG_DEVICE void load_chunk(const LinearAttentionParams& p, const Place& place, const Chunk& chunk, u32 first,
                          u32 count) {
#pragma unroll 1
    for (u32 i = thread_index() / 32; i < count; i += QG_THREADS / 32)
        load_query_and_key(p, place, chunk, i, first + i);
#pragma unroll 1
    for (u32 at = thread_index(); at < count * place.cta_rows; at += QG_THREADS) {
        const u32 i = at / place.cta_rows, row = place.first_row + at % place.cta_rows;
        const u64 value = (first + i) * p.at.v_token + place.head * p.at.v_head + row;
        st_shared(&chunk.v[at], row < p.shape.v_dim ? load_dense(QG_X_DTYPE, p.at.v, value) : 0.0f);
    }
    if (p.shape.flags & QG_FLAG_DECAY_FEATURES) {
#pragma unroll 1
        for (u32 at = thread_index(); at < count * chunk.pitch; at += QG_THREADS) {
            const u32 i = at / chunk.pitch, column = at % chunk.pitch;
            const u32 index = place.head * p.shape.qk_dim + column;
            st_shared(&chunk.decay[at],
                      column < p.shape.qk_dim ? decay_of(p, first + i, place.head, index) : 0.0f);
        }
    } else if (thread_index() < count) {
        const u32 i = thread_index();
        st_shared(&chunk.decay[i], p.at.decay ? decay_of(p, first + i, place.head, place.head) : 1.0f);
    }
    if (thread_index() < count) {
        const u64 beta = (first + thread_index()) * p.at.beta_token + place.head;
        st_shared(&chunk.beta[thread_index()], p.at.beta ? bits_to_f32(index_at(p.at.beta, beta)) : 1.0f);
    }
}
