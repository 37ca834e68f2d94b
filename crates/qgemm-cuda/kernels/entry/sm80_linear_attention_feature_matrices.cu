// Linear attention in chunks: matrices of the
// tokens of a chunk, for features that decay by
// themselves. A CTA has a chunk of a head. A
// thread has a quarter of a key, which decays
// from token to token while it is multiplied
// with theirs, so that no decay is a quotient.
#include "recurrence/chunk_features.cuh"
#include "recurrence/chunk_matrices.cuh"
#include "recurrence/query_and_key.cuh"

// Threads of a key, features of each, and keys
// of a warp.
constexpr u32 SHARES = 4, SHARE = MOST_DIM / SHARES, WARP_KEYS = 32 / SHARES;
// Columns of a row in shared memory; 4 more
// avoid bank conflicts.
constexpr u32 PITCH = MOST_DIM + 4;

struct SharedStorage {
    alignas(16) float k[CHUNK][PITCH];
    alignas(16) float q[CHUNK][PITCH];
    // Decay of each feature at each token.
    alignas(16) float decay[CHUNK][PITCH];
    ChunkTokens tokens;
};
static_assert(sizeof(SharedStorage) == QG_SHARED_BYTES, "the host computes another size");

// Tokens beyond the last are zeros with a decay
// of 1.
QG_DEVICE void load_tokens(SharedStorage& shared, const LinearAttentionParams& p, const ChunkOfSegment& chunk) {
    const u32 column = thread_index() % 32 * 8;
#pragma unroll 2
    for (u32 i = thread_index() / 32; i < CHUNK; i += QG_THREADS / 32) {
        QueryAndKey of = {};
        if (i < chunk.count) of = QueryAndKey::load(p, chunk.segment.key_head, chunk.first + i);
        if (column < MOST_DIM) QueryAndKey::store(of, &shared.q[i][column], &shared.k[i][column]);
    }
    ChunkTokens::load(shared.tokens, p, chunk.segment, chunk.first, chunk.count);
    static_assert(QG_THREADS == MOST_DIM, "a thread for each feature");
    const u32 feature = thread_index(), index = chunk.segment.head * p.shape.qk_dim + feature;
#pragma unroll 8
    for (u32 i = 0; i < CHUNK; i++) {
        const bool decays = i < chunk.count && feature < p.shape.qk_dim;
        const float g = decays ? log_decay_of(p, chunk.first + i, chunk.segment.head, index) : 0.0f;
        st_shared(&shared.decay[i][feature], decay_of_log(g));
    }
}

// Writes queries and keys with their decays, and
// the decays of the chunk: a thread a feature.
QG_DEVICE void write_features(const SharedStorage& shared, const ChunkedParams& p, u64 first_row) {
    const u32 feature = thread_index();
    const bool delta = p.attention.shape.flags & QG_FLAG_DELTA;
    float from_begin = 1.0f, to_end = 1.0f;
#pragma unroll 4
    for (u32 i = 0; i < CHUNK; i++) {
        from_begin = scaled(from_begin, ld_shared(&shared.decay[i][feature]));
        write_decayed(p, first_row, DECAYED_QUERY, i, feature, scaled(ld_shared(&shared.q[i][feature]), from_begin));
        write_decayed(p, first_row, DECAYED_KEY, i, feature, scaled(ld_shared(&shared.k[i][feature]), from_begin));
    }
#pragma unroll 4
    for (u32 after = 0; after < CHUNK; after++) {
        const u32 i = CHUNK - 1 - after;
        const float beta = delta ? 1.0f : ld_shared(&shared.tokens.beta[i]);
        write_decayed(p, first_row, KEY_OF_STATE, i, feature, scaled(ld_shared(&shared.k[i][feature]) * beta, to_end));
        to_end = scaled(to_end, ld_shared(&shared.decay[i][feature]));
    }
    st_global_f32(feature_decays(p, first_row) + feature, from_begin);
}

QG_DEVICE void load_four(float (&v)[4], const float* from) {
    const f32x4 four = ld_shared(reinterpret_cast<const f32x4*>(from));
    v[0] = four.x, v[1] = four.y, v[2] = four.z, v[3] = four.w;
}

// Sum over the threads of a key.
QG_DEVICE float key_sum(float value) {
#pragma unroll
    for (u32 mask = SHARES / 2; mask > 0; mask /= 2) value += shfl_xor(value, mask);
    return value;
}

// Products of key `from` with the keys and
// queries of later tokens. Threads interleave
// groups of four features.
QG_DEVICE void multiply(SharedStorage& shared, const ChunkedParams& p, u64 first_row, u32 from, u32 first_to, u32 share) {
    float key[SHARE / 4][4];
#pragma unroll
    for (u32 group = 0; group < SHARE / 4; group++) load_four(key[group], &shared.k[from][(group * SHARES + share) * 4]);
#pragma unroll 1
    for (u32 to = first_to; to < CHUNK; to++) {
        float kk = 0.0f, qk = 0.0f;
#pragma unroll
        for (u32 group = 0; group < SHARE / 4; group++) {
            const u32 feature = (group * SHARES + share) * 4;
            float decay[4], k[4], q[4];
            load_four(decay, &shared.decay[to][feature]);
            load_four(k, &shared.k[to][feature]);
            load_four(q, &shared.q[to][feature]);
#pragma unroll
            for (u32 j = 0; j < 4; j++) {
                if (to > from) key[group][j] = scaled(key[group][j], decay[j]);
                kk = fma_f32(k[j], key[group][j], kk);
                qk = fma_f32(q[j], key[group][j], qk);
            }
        }
        kk = key_sum(kk), qk = key_sum(qk);
        if (share > 0) continue;
        const float is_visible = from <= to ? 1.0f : 0.0f;
        ChunkTokens::put_lower(shared.tokens, to, from, kk, is_visible);
        ChunkTokens::write_output(shared.tokens, p, first_row, to, from, qk, is_visible);
    }
}

// Zeros above the diagonal that `multiply` does
// not visit.
QG_DEVICE void clear_upper(const ChunkedParams& p, u64 first_row, u32 from, u32 first_to) {
    for (u32 to = 0; to < first_to; to++) write_matrix(p, first_row + to, OUTPUTS, from, 0.0f);
}

extern "C" __global__ void __launch_bounds__(QG_THREADS)
    qg_sm80_linear_attention_feature_matrices(const __grid_constant__ ChunkedParams p) {
    SharedStorage& shared = *reinterpret_cast<SharedStorage*>(dynamic_shared());
    griddepcontrol_launch_dependents();
    griddepcontrol_wait();
    const ChunkOfSegment chunk = ChunkOfSegment::of(p, cta_index().x);
    if (chunk.count == 0) return;
    load_tokens(shared, p.attention, chunk);
    cta_barrier();
    write_features(shared, p, chunk.first_row);
    const u32 from = thread_index() / SHARES, share = thread_index() % SHARES, first_to = from / WARP_KEYS * WARP_KEYS;
    static_assert(QG_THREADS == CHUNK * SHARES, "a thread for each share of a key");
    multiply(shared, p, chunk.first_row, from, first_to, share);
    if (share == 0) clear_upper(p, chunk.first_row, from, first_to);
    cta_barrier();
    if (thread_index() < 32 && p.attention.shape.flags & QG_FLAG_DELTA)
        ChunkTokens::invert(shared.tokens, p, chunk.first_row);
}
