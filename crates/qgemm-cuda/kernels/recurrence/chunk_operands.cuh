// Linear attention in chunks: operands of a
// chunk on their way to shared memory. Loads of
// whole eights are in flight during the products
// of the chunk before.
#pragma once
#include "atoms/cp_async.cuh"
#include "recurrence/chunk_features.cuh"
#include "recurrence/chunk_planes.cuh"
#include "recurrence/query_and_key.cuh"

// Rows (values) of a state in a CTA: 16 a warp.
constexpr u32 WARP_ROWS = 16, CTA_ROWS = QG_THREADS / 32 * WARP_ROWS;
// Eights of a token's queries and values, and
// tokens that the CTA's threads load at once.
constexpr u32 EIGHTS = MOST_DIM / 8, TOKENS_AT_ONCE = QG_THREADS / EIGHTS;
constexpr u32 V_EIGHTS = CTA_ROWS / 8, V_TOKENS_AT_ONCE = QG_THREADS / V_EIGHTS;
// Eights of a token's rows of matrices.
constexpr u32 MATRIX_EIGHTS = CHUNK_MATRICES * 2 * CHUNK / 8, MATRIX_TOKENS_AT_ONCE = QG_THREADS / MATRIX_EIGHTS;

// Begins to copy the matrices of a chunk and the
// factors of its tokens. All of their rows have
// been written.
QG_DEVICE void copy_numbers(ChunkNumbers& numbers, const ChunkedParams& p, u64 first_row) {
    const u32 thread = thread_index(), eight = thread % MATRIX_EIGHTS, column = eight % (CHUNK / 8) * 8;
    const u32 part = eight / (CHUNK / 8) % 2, matrix = eight / (CHUNK / 8) / 2;
    const bool is_written = matrix == OUTPUTS || p.attention.shape.flags & QG_FLAG_DELTA;
#pragma unroll
    for (u32 i = thread / MATRIX_EIGHTS; i < CHUNK; i += MATRIX_TOKENS_AT_ONCE)
        if (is_written)
            cp_async_16(shared_address(&numbers.matrices[matrix].parts[part][i][column]),
                        matrix_at(p, first_row + i, matrix, part, column));
#if !QG_DECAY_FEATURES
    if (thread < CHUNK)
        cp_async_16(shared_address(&numbers.factors[thread]), reinterpret_cast<const u8*>(factors_of(p, first_row + thread)));
#endif
}

#if QG_DECAY_FEATURES
// Begins to copy the decayed rows of a chunk.
QG_DEVICE void copy_decayed(ChunkPlanes& planes, const ChunkedParams& p, u64 first_row) {
    const u32 column = thread_index() % EIGHTS * 8;
    const auto copy = [&](Plane<WIDE, PARTS>& plane, u32 row) {
#pragma unroll
        for (u32 part = 0; part < PARTS; part++)
#pragma unroll
            for (u32 i = thread_index() / EIGHTS; i < CHUNK; i += TOKENS_AT_ONCE)
                cp_async_16(shared_address(&plane.parts[part][i][column]), decayed_at(p, first_row, row, part, i, column));
    };
    copy(planes.query, DECAYED_QUERY);
    copy(planes.key, DECAYED_KEY);
    copy(planes.key_of_state, KEY_OF_STATE);
    const u32 four = thread_index() * 4;
    if (four < MOST_DIM)
        cp_async_16(shared_address(&planes.decay[four]), reinterpret_cast<const u8*>(feature_decays(p, first_row) + four));
}
#endif

// What a thread loads of a chunk. Rows of tokens
// beyond `count` are zeros.
struct ChunkOperands {
    using Stored = Eight<QG_X_DTYPE>;
#if !QG_DECAY_FEATURES
    Stored q[CHUNK / TOKENS_AT_ONCE], k[CHUNK / TOKENS_AT_ONCE];
#endif
    Stored v[CHUNK / V_TOKENS_AT_ONCE];

    // Whether rows are loaded as whole eights. Those
    // of f32 do not fit in registers beside a state.
    QG_DEVICE bool has_eights(const LinearAttentionParams& p) {
        return QG_X_DTYPE != DTYPE_F32 && p.shape.flags & QG_FLAG_X_ALIGNED16 && p.shape.v_dim % 8 == 0;
    }

    QG_DEVICE void load(ChunkOperands& of, const LinearAttentionParams& p, const Segment& segment, u32 cta_row, u32 begin,
                        u32 count) {
        if (!has_eights(p)) return;
        const u32 thread = thread_index(), first = segment.first + begin;
#if !QG_DECAY_FEATURES
        const u32 column = thread % EIGHTS * 8;
        const u64 q = segment.key_head * p.at.q_head + column, k = segment.key_head * p.at.k_head + column;
#pragma unroll
        for (u32 n = 0; n < CHUNK / TOKENS_AT_ONCE; n++) {
            const u32 i = thread / EIGHTS + n * TOKENS_AT_ONCE;
            const bool is_there = i < count && column < p.shape.qk_dim;
            of.q[n] = eight_of(p.at.q, q + (first + i) * p.at.q_token, is_there);
            of.k[n] = eight_of(p.at.k, k + (first + i) * p.at.k_token, is_there);
        }
#endif
        const u32 row = cta_row + thread % V_EIGHTS * 8;
#pragma unroll
        for (u32 n = 0; n < CHUNK / V_TOKENS_AT_ONCE; n++) {
            const u32 i = thread / V_EIGHTS + n * V_TOKENS_AT_ONCE;
            const u64 v = (first + i) * p.at.v_token + segment.head * p.at.v_head + row;
            of.v[n] = eight_of(p.at.v, v, i < count && row < p.shape.v_dim);
        }
    }
    QG_DEVICE Stored eight_of(u64 base, u64 element, bool is_there) {
        return is_there ? Stored::load(reinterpret_cast<const u8*>(base) + Stored::offset_of(element), true)
                        : Stored::zeros();
    }

    // Stores them in shared memory; values as f32,
    // [token][row].
    QG_DEVICE void store(const ChunkOperands& of, ChunkPlanes& planes, float (&values)[CHUNK][CTA_ROWS + 4]) {
        const u32 thread = thread_index();
#if !QG_DECAY_FEATURES
#pragma unroll
        for (u32 n = 0; n < CHUNK / TOKENS_AT_ONCE; n++) {
            const u32 i = thread / EIGHTS + n * TOKENS_AT_ONCE, column = thread % EIGHTS * 8;
            Plane<WIDE, PARTS>::put_eight(planes.query, i, column, of.q[n]);
            Plane<WIDE, PARTS>::put_eight(planes.key, i, column, of.k[n]);
        }
#endif
#pragma unroll
        for (u32 n = 0; n < CHUNK / V_TOKENS_AT_ONCE; n++) {
            const u32 i = thread / V_EIGHTS + n * V_TOKENS_AT_ONCE, row = thread % V_EIGHTS * 8;
            float numbers[8];
#pragma unroll
            for (u32 j = 0; j < 8; j++) numbers[j] = Stored::number(of.v[n], j);
            store_eight(&values[i][row], numbers);
        }
    }

    // Loads rows that are not whole eights, and
    // stores them: a number at a time.
    QG_DEVICE void store_unaligned(const LinearAttentionParams& p, const Segment& segment, u32 cta_row, u32 first,
                                   u32 count, ChunkPlanes& planes, float (&values)[CHUNK][CTA_ROWS + 4]) {
#if !QG_DECAY_FEATURES
#pragma unroll 4
        for (u32 at = thread_index(); at < CHUNK * MOST_DIM / 2; at += QG_THREADS) {
            const u32 i = at / (MOST_DIM / 2), column = at % (MOST_DIM / 2) * 2;
            float q[2] = {}, k[2] = {};
            if (i < count && column < p.shape.qk_dim) {
                const u64 of_q = (first + i) * p.at.q_token + segment.key_head * p.at.q_head + column;
                const u64 of_k = (first + i) * p.at.k_token + segment.key_head * p.at.k_head + column;
#pragma unroll
                for (u32 j = 0; j < 2; j++) {
                    q[j] = load_dense(QG_X_DTYPE, p.at.q, of_q + j);
                    k[j] = load_dense(QG_X_DTYPE, p.at.k, of_k + j);
                }
            }
            Plane<WIDE, PARTS>::put_pair(planes.query, i, column, q[0], q[1]);
            Plane<WIDE, PARTS>::put_pair(planes.key, i, column, k[0], k[1]);
        }
#endif
#pragma unroll 4
        for (u32 at = thread_index(); at < CHUNK * CTA_ROWS; at += QG_THREADS) {
            const u32 i = at / CTA_ROWS, row = cta_row + at % CTA_ROWS;
            const u64 v = (first + i) * p.at.v_token + segment.head * p.at.v_head + row;
            const bool is_there = i < count && row < p.shape.v_dim;
            st_shared(&values[i][at % CTA_ROWS], is_there ? load_dense(QG_X_DTYPE, p.at.v, v) : 0.0f);
        }
    }
};
