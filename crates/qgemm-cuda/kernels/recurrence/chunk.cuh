// Linear attention: a chunk of tokens of a head in shared memory.
#pragma once
#include "recurrence/query_and_key.cuh"

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

// Query and key of a token, by a warp: eight columns a lane.
QG_DEVICE void load_query_and_key(const LinearAttentionParams& p, const Place& place, const Chunk& chunk, u32 i,
                                  u32 token) {
    const u32 column = thread_index() % 32 * 8;
    QueryAndKey of = QueryAndKey::load(p, place.key_head, token);
    if (column == 0) st_shared(&chunk.qk[i], of.qk);
    if (column >= chunk.pitch) return;
    QueryAndKey::store(of, &chunk.q[i * chunk.pitch + column], &chunk.k[i * chunk.pitch + column]);
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
            const bool is_there = column < p.shape.qk_dim;
            st_shared(&chunk.decay[at],
                      is_there ? decay_of_log(log_decay_of(p, first + i, place.head, index)) : 0.0f);
        }
    } else if (thread_index() < count) {
        const u32 i = thread_index();
        st_shared(&chunk.decay[i], p.at.decay ? decay_of_log(log_decay_of(p, first + i, place.head, place.head)) : 1.0f);
    }
    if (thread_index() < count)
        st_shared(&chunk.beta[thread_index()], beta_of(p, first + thread_index(), place.head));
}
