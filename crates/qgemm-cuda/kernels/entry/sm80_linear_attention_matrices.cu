// Linear attention in chunks: matrices of the
// tokens of a chunk, for a decay a head. A CTA
// has a chunk of a head; a warp multiplies 16 of
// its keys, or of its queries, with the keys.
#include "recurrence/chunk_matrices.cuh"
#include "recurrence/chunk_planes.cuh"
#include "recurrence/query_and_key.cuh"

// Eights of a token's queries, and tokens that
// the CTA's threads load at once.
constexpr u32 EIGHTS = MOST_DIM / 8, TOKENS_AT_ONCE = QG_THREADS / EIGHTS;
constexpr u32 ROWS = 16, TOKEN_TILES = CHUNK / 8;
static_assert(QG_THREADS / 32 == 2 * CHUNK / ROWS, "a warp for each row tile of two products");

struct SharedStorage {
    Plane<WIDE, PARTS> key, query;
    ChunkTokens tokens;
};
static_assert(sizeof(SharedStorage) == QG_SHARED_BYTES, "the host computes another size");

// Sum over the lanes of a token.
QG_DEVICE float token_sum(float value) {
#pragma unroll
    for (u32 mask = EIGHTS / 2; mask > 0; mask /= 2) value += shfl_xor(value, mask);
    return value;
}

// Squared norm of the row that a thread has
// eight numbers of.
QG_DEVICE float squared_norm(const Eight<QG_X_DTYPE>& stored) {
    float sum = 0.0f;
#pragma unroll
    for (u32 j = 0; j < 8; j++) {
        const float number = Eight<QG_X_DTYPE>::number(stored, j);
        sum = fma_f32(number, number, sum);
    }
    return token_sum(sum);
}

// Tokens beyond the last are zeros.
QG_DEVICE void load_tokens(SharedStorage& shared, const LinearAttentionParams& p, const ChunkOfSegment& chunk) {
    using Stored = Eight<QG_X_DTYPE>;
    const bool aligned = p.shape.flags & QG_FLAG_X_ALIGNED16, normalizes = p.shape.flags & QG_FLAG_L2_NORM;
    const u32 column = thread_index() % EIGHTS * 8;
    Stored q[CHUNK / TOKENS_AT_ONCE], k[CHUNK / TOKENS_AT_ONCE];
#pragma unroll
    for (u32 n = 0; n < CHUNK / TOKENS_AT_ONCE; n++) {
        const u32 i = thread_index() / EIGHTS + n * TOKENS_AT_ONCE;
        const u64 of_q = (chunk.first + i) * p.at.q_token + chunk.segment.key_head * p.at.q_head + column;
        const u64 of_k = (chunk.first + i) * p.at.k_token + chunk.segment.key_head * p.at.k_head + column;
        const bool is_there = i < chunk.count && column < p.shape.qk_dim;
        q[n] = is_there ? Stored::load(reinterpret_cast<const u8*>(p.at.q) + Stored::offset_of(of_q), aligned) : Stored::zeros();
        k[n] = is_there ? Stored::load(reinterpret_cast<const u8*>(p.at.k) + Stored::offset_of(of_k), aligned) : Stored::zeros();
    }
    ChunkTokens::load(shared.tokens, p, chunk.segment, chunk.first, chunk.count);
#pragma unroll
    for (u32 n = 0; n < CHUNK / TOKENS_AT_ONCE; n++) {
        const u32 i = thread_index() / EIGHTS + n * TOKENS_AT_ONCE;
        Plane<WIDE, PARTS>::put_eight(shared.query, i, column, q[n]);
        Plane<WIDE, PARTS>::put_eight(shared.key, i, column, k[n]);
        float q_factor = p.shape.scale, k_factor = 1.0f;
        if (normalizes) {
            q_factor = q_factor / sqrt_f32(squared_norm(q[n]) + p.shape.epsilon);
            k_factor = 1.0f / sqrt_f32(squared_norm(k[n]) + p.shape.epsilon);
        }
        if (i >= chunk.count) q_factor = k_factor = 0.0f;
        if (column == 0) {
            st_shared(&shared.tokens.q_factor[i], q_factor);
            st_shared(&shared.tokens.k_factor[i], k_factor);
        }
    }
}

// acc = rows of `a` · keysᵀ, for 16 rows and the
// keys up to them.
QG_DEVICE void multiply(float (&acc)[TOKEN_TILES][4], const Plane<WIDE, PARTS>& a, const Plane<WIDE, PARTS>& keys,
                        u32 first_row, u32 qk_dim, u32 lane) {
#pragma unroll 1
    for (u32 column = 0; column < qk_dim; column += 16) {
        SplitA of_a = {};
        const u32 row = first_row + lane % 16, at = column + lane / 16 * 8;
        ldmatrix_x4(of_a.hi, Plane<WIDE, PARTS>::address(a, 0, row, at));
        if constexpr (PARTS == 2) ldmatrix_x4(of_a.lo, Plane<WIDE, PARTS>::address(a, PARTS - 1, row, at));
#pragma unroll
        for (u32 pair = 0; pair < TOKEN_TILES; pair += 2) {
            if (pair * 8 > first_row) break;
            multiply_rows<PARTS == 2>(acc[pair], acc[pair + 1], of_a, keys, pair * 8, column, lane);
        }
    }
}

extern "C" __global__ void __launch_bounds__(QG_THREADS)
    qg_sm80_linear_attention_matrices(const __grid_constant__ ChunkedParams p) {
    SharedStorage& shared = *reinterpret_cast<SharedStorage*>(dynamic_shared());
    griddepcontrol_launch_dependents();
    griddepcontrol_wait();
    const ChunkOfSegment chunk = ChunkOfSegment::of(p, cta_index().x);
    if (chunk.count == 0) return;
    load_tokens(shared, p.attention, chunk);
    cta_barrier();
    const u32 lane = thread_index() % 32, warp = thread_index() / 32, first_row = warp % 2 * ROWS;
    const bool of_queries = warp >= 2;
    float acc[TOKEN_TILES][4] = {};
    multiply(acc, of_queries ? shared.query : shared.key, shared.key, first_row, p.attention.shape.qk_dim, lane);
    const u32 resets = ld_shared(&shared.tokens.resets);
#pragma unroll
    for (u32 tile = 0; tile < TOKEN_TILES; tile++)
#pragma unroll
        for (u32 e = 0; e < 4; e++) {
            const u32 to = first_row + lane / 4 + e / 2 * 8, from = tile * 8 + lane % 4 * 2 + e % 2;
            float decay = 0.0f;
            if (from <= to)
                decay = decay_between(resets, from, to, ld_shared(&shared.tokens.sum[from]), ld_shared(&shared.tokens.sum[to]));
            const float product = acc[tile][e] * ld_shared(&shared.tokens.k_factor[from]);
            if (of_queries)
                ChunkTokens::write_output(shared.tokens, p, chunk.first_row, to, from,
                                          product * ld_shared(&shared.tokens.q_factor[to]), decay);
            else
                ChunkTokens::put_lower(shared.tokens, to, from, product * ld_shared(&shared.tokens.k_factor[to]), decay);
        }
    cta_barrier();
    if (warp > 0) return;
    ChunkTokens::write_factors(shared.tokens, p, chunk.first_row);
    if (p.attention.shape.flags & QG_FLAG_DELTA) ChunkTokens::invert(shared.tokens, p, chunk.first_row);
}
