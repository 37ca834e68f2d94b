// Linear attention in chunks: what the kernels
// of the matrices share.
#pragma once
#include "dequant/bf16_split.cuh"
#include "recurrence/chunked.cuh"

// The chunk of a CTA.
struct ChunkOfSegment {
    Segment segment;
    // First token, tokens, and first row in the
    // workspace.
    u32 first, count;
    u64 first_row;

    QG_DEVICE ChunkOfSegment of(const ChunkedParams& p, u32 cta) {
        const u32 chunks = p.chunks.tokens / CHUNK, begin = cta % chunks * CHUNK;
        const Segment segment = Segment::of(p, cta / chunks);
        return {segment, segment.first + begin, least(beyond(segment.count, begin), CHUNK), row_of(p, segment, begin)};
    }
};

QG_DEVICE void write_matrix(const ChunkedParams& p, u64 row, u32 matrix, u32 column, float value) {
    u32 hi, lo;
    split_finite_bf16x2(hi, lo, value, 0.0f);
    st_global_u16(matrix_at(p, row, matrix, 0, column), hi);
    st_global_u16(matrix_at(p, row, matrix, 1, column), lo);
}

// Numbers of the tokens of a chunk, and the
// lower matrix.
struct ChunkTokens {
    // Strictly lower: β_i Γ(i, j) k_i·k_j.
    alignas(16) float lower[CHUNK][CHUNK];
    float beta[CHUNK], q_factor[CHUNK], k_factor[CHUNK];
    // Log-decays of a head, their sums, and the
    // resets.
    float g[CHUNK], sum[CHUNK];
    u32 resets;

    // β and the decays of a head, by the first warp.
    // Tokens beyond the last have a decay of 1.
    QG_DEVICE void load(ChunkTokens& tokens, const LinearAttentionParams& p, const Segment& segment, u32 first,
                        u32 count) {
        const u32 i = thread_index();
        if (i >= CHUNK) return;
        st_shared(&tokens.beta[i], i < count ? beta_of(p, first + i, segment.head) : 0.0f);
        const bool decays = !QG_DECAY_FEATURES && i < count && p.at.decay;
        st_shared(&tokens.g[i], decays ? log_decay_of(p, first + i, segment.head, segment.head) : 0.0f);
        warp_barrier();
        Decays own = Decays::none();
#pragma unroll 1
        for (u32 j = 0; j <= i; j++) Decays::add(own, j, ld_shared(&tokens.g[j]));
        st_shared(&tokens.sum[i], own.sum);
        if (i == CHUNK - 1) st_shared(&tokens.resets, own.resets);
    }

    // Stores an element of the lower matrix.
    QG_DEVICE void put_lower(ChunkTokens& tokens, u32 to, u32 from, float kk, float decay) {
        st_shared(&tokens.lower[to][from], from < to ? scaled(ld_shared(&tokens.beta[to]) * kk, decay) : 0.0f);
    }

    // Writes an element of P.
    QG_DEVICE void write_output(const ChunkTokens& tokens, const ChunkedParams& p, u64 first_row, u32 to, u32 from,
                                float qk, float decay) {
        const float beta = p.attention.shape.flags & QG_FLAG_DELTA ? 1.0f : ld_shared(&tokens.beta[from]);
        write_matrix(p, first_row + to, OUTPUTS, from, scaled(qk * beta, decay));
    }

    // Factors of a token: a lane a token.
    QG_DEVICE void write_factors(const ChunkTokens& tokens, const ChunkedParams& p, u64 first_row) {
        const u32 i = thread_index();
        const u32 resets = ld_shared(&tokens.resets);
        const float own = ld_shared(&tokens.sum[i]), all = ld_shared(&tokens.sum[CHUNK - 1]);
        const float from_begin = decay_from_begin(resets, i, own), of_chunk = decay_from_begin(resets, CHUNK - 1, all);
        const float to_end = decay_between(resets, i, CHUNK - 1, own, all);
        const float beta = p.attention.shape.flags & QG_FLAG_DELTA ? 1.0f : ld_shared(&tokens.beta[i]);
        const float query = ld_shared(&tokens.q_factor[i]), key = ld_shared(&tokens.k_factor[i]);
        st_global_f32x4(factors_of(p, first_row + i),
                        f32x4{query * from_begin, key * from_begin, key * beta * to_end, of_chunk});
    }

    // Inverts the unit lower matrix: a lane a
    // column.
    QG_DEVICE void invert(const ChunkTokens& tokens, const ChunkedParams& p, u64 first_row) {
        static_assert(CHUNK == 32, "a lane for each column");
        const u32 column = thread_index();
        const float beta = ld_shared(&tokens.beta[column]);
        float inverse[CHUNK];
#pragma unroll
        for (u32 i = 0; i < CHUNK; i++) {
            float sum = 0.0f;
#pragma unroll
            for (u32 l = 0; l < i; l++) sum = fma_f32(ld_shared(&tokens.lower[i][l]), inverse[l], sum);
            // Above the diagonal it is 0, even if a row has
            // NaN.
            inverse[i] = i < column ? 0.0f : (i == column ? 1.0f : 0.0f) - sum;
            write_matrix(p, first_row + i, INVERSE, column, i < column ? 0.0f : inverse[i] * beta);
        }
    }
};
