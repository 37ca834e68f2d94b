// Linear attention in chunks:
// matrices of the tokens of a chunk.
// A CTA has a chunk of a head.
// Products of its queries and keys are f32 sums,
// so that each feature may have its own decay.
#include "recurrence/chunked.cuh"
#include "recurrence/query_and_key.cuh"

// Pairs of tokens of a thread: 2 × 4.
// Rows are 16 tokens apart and columns 8.
// Adjacent lanes read adjacent rows of shared
// memory, without bank conflicts.
constexpr u32 ROWS = 2, COLUMNS = 4, ROW_STEP = CHUNK / ROWS, COLUMN_STEP = CHUNK / COLUMNS;
static_assert(QG_THREADS == ROW_STEP * COLUMN_STEP, "a thread for each tile of pairs");

// Whether some pair of this index is not above the diagonal.
QG_DEVICE constexpr bool is_lower(u32 r, u32 c) {
    return c * COLUMN_STEP < (r + 1) * ROW_STEP;
}

// Columns of a row in shared memory; 4 more avoid bank conflicts.
constexpr u32 MOST_DIM = 128, PITCH = MOST_DIM + 4;

struct SharedStorage {
    alignas(16) float k[CHUNK][PITCH];
    alignas(16) float q[CHUNK][PITCH];
    // Sums of log-decays of each feature,
    // and the features' resets.
    alignas(16) float sums[CHUNK][PITCH];
    u32 resets[MOST_DIM];
    // Strictly lower: β_i Γ(i, j) k_i·k_j.
    alignas(16) float lower[CHUNK][CHUNK];
    float beta[CHUNK], q_factor[CHUNK], k_factor[CHUNK];
    // Log-decays of a head, their sums, and the resets.
    float g[CHUNK], sum[CHUNK];
    u32 head_resets;
};
static_assert(sizeof(SharedStorage) == QG_SHARED_BYTES, "the host computes another size");

// Tokens beyond the last are zeros with a decay of 1.
QG_DEVICE void load_tokens(SharedStorage& shared, const LinearAttentionParams& p, const Segment& segment, u32 first,
                           u32 count) {
    const u32 column = thread_index() % 32 * 8;
#pragma unroll 1
    for (u32 i = thread_index() / 32; i < CHUNK; i += QG_THREADS / 32) {
        QueryAndKey of = {};
        if (i < count) of = QueryAndKey::load(p, segment.key_head, first + i);
        if (column == 0) {
            st_shared(&shared.q_factor[i], of.q_factor);
            st_shared(&shared.k_factor[i], of.k_factor);
        }
        if (column < MOST_DIM) QueryAndKey::store(of, &shared.q[i][column], &shared.k[i][column]);
    }
    const u32 i = thread_index();
    if (i >= CHUNK) return;
    st_shared(&shared.beta[i], i < count ? beta_of(p, first + i, segment.head) : 0.0f);
    const bool decays = i < count && p.at.decay && !(p.shape.flags & QG_FLAG_DECAY_FEATURES);
    st_shared(&shared.g[i], decays ? log_decay_of(p, first + i, segment.head, segment.head) : 0.0f);
    // These threads are a warp.
    warp_barrier();
    Decays own = Decays::none();
#pragma unroll 1
    for (u32 j = 0; j <= i; j++) Decays::add(own, j, ld_shared(&shared.g[j]));
    st_shared(&shared.sum[i], own.sum);
    if (i == CHUNK - 1) st_shared(&shared.head_resets, own.resets);
}

// Sums of log-decays: a thread a feature.
QG_DEVICE void sum_of_features(SharedStorage& shared, const LinearAttentionParams& p, const Segment& segment, u32 first,
                               u32 count) {
    const u32 feature = thread_index();
    static_assert(QG_THREADS == MOST_DIM, "a thread for each feature");
    Decays decays = Decays::none();
#pragma unroll 1
    for (u32 i = 0; i < CHUNK; i++) {
        if (i < count && feature < p.shape.qk_dim) {
            const u32 index = segment.head * p.shape.qk_dim + feature;
            Decays::add(decays, i, log_decay_of(p, first + i, segment.head, index));
        }
        st_shared(&shared.sums[i][feature], decays.sum);
    }
    st_shared(&shared.resets[feature], decays.resets);
}

QG_DEVICE f32x4 four_of(const float* row, u32 column) {
    return ld_shared(reinterpret_cast<const f32x4*>(row + column));
}

// Products k·k and q·k of the thread's pairs.
// With FEATURES each feature decays by itself.
template <bool FEATURES>
QG_DEVICE void multiply(const SharedStorage& shared, u32 qk_dim, u32 row, u32 column, float (&kk)[ROWS][COLUMNS],
                        float (&qk)[ROWS][COLUMNS]) {
#pragma unroll 1
    for (u32 feature = 0; feature < qk_dim; feature += 4) {
        float k[ROWS][4], q[ROWS][4], sum[ROWS][4];
#pragma unroll
        for (u32 r = 0; r < ROWS; r++) {
            const u32 to = row + r * ROW_STEP;
            const f32x4 four_k = four_of(shared.k[to], feature), four_q = four_of(shared.q[to], feature);
            k[r][0] = four_k.x, k[r][1] = four_k.y, k[r][2] = four_k.z, k[r][3] = four_k.w;
            q[r][0] = four_q.x, q[r][1] = four_q.y, q[r][2] = four_q.z, q[r][3] = four_q.w;
            if constexpr (FEATURES) {
                const f32x4 four = four_of(shared.sums[to], feature);
                sum[r][0] = four.x, sum[r][1] = four.y, sum[r][2] = four.z, sum[r][3] = four.w;
            }
        }
#pragma unroll
        for (u32 c = 0; c < COLUMNS; c++) {
            const u32 from = column + c * COLUMN_STEP;
            const f32x4 four = four_of(shared.k[from], feature);
            const float other[4] = {four.x, four.y, four.z, four.w};
            float from_sum[4] = {};
            if constexpr (FEATURES) {
                const f32x4 sums = four_of(shared.sums[from], feature);
                from_sum[0] = sums.x, from_sum[1] = sums.y, from_sum[2] = sums.z, from_sum[3] = sums.w;
            }
#pragma unroll
            for (u32 r = 0; r < ROWS; r++) {
                if (!is_lower(r, c)) continue;
                const u32 to = row + r * ROW_STEP;
#pragma unroll
                for (u32 j = 0; j < 4; j++) {
                    float k_from = other[j];
                    if constexpr (FEATURES) {
                        const u32 resets = ld_shared(&shared.resets[feature + j]);
                        if (from <= to) k_from = scaled(k_from, decay_between(resets, from, to, from_sum[j], sum[r][j]));
                    }
                    kk[r][c] = fma_f32(k[r][j], k_from, kk[r][c]);
                    qk[r][c] = fma_f32(q[r][j], k_from, qk[r][c]);
                }
            }
        }
    }
}

// Writes the pairs' elements of P, and of the lower matrix.
QG_DEVICE void finish_pairs(SharedStorage& shared, const ChunkedParams& p, u64 first_row, bool features, u32 row,
                            u32 column, float (&kk)[ROWS][COLUMNS], float (&qk)[ROWS][COLUMNS]) {
    const bool delta = p.attention.shape.flags & QG_FLAG_DELTA;
    const u32 resets = ld_shared(&shared.head_resets);
#pragma unroll
    for (u32 r = 0; r < ROWS; r++) {
        const u32 to = row + r * ROW_STEP;
        const float beta = ld_shared(&shared.beta[to]), sum = ld_shared(&shared.sum[to]);
#pragma unroll
        for (u32 c = 0; c < COLUMNS; c++) {
            const u32 from = column + c * COLUMN_STEP;
            float decay = from <= to ? 1.0f : 0.0f;
            if (!features && from <= to)
                decay = decay_between(resets, from, to, ld_shared(&shared.sum[from]), sum);
            const float beta_of_column = delta ? 1.0f : ld_shared(&shared.beta[from]);
            st_global_f32(matrix_row(p, first_row + to) + CHUNK + from, scaled(qk[r][c] * beta_of_column, decay));
            st_shared(&shared.lower[to][from], from < to ? scaled(beta * kk[r][c], decay) : 0.0f);
        }
    }
}

// A warp inverts the unit lower matrix: a lane a column.
QG_DEVICE void invert(const SharedStorage& shared, const ChunkedParams& p, u64 first_row) {
    static_assert(CHUNK == 32, "a lane for each column");
    const u32 column = thread_index();
    const float beta = ld_shared(&shared.beta[column]);
    float inverse[CHUNK];
#pragma unroll
    for (u32 i = 0; i < CHUNK; i++) {
        float sum = 0.0f;
#pragma unroll
        for (u32 l = 0; l < i; l++) sum = fma_f32(ld_shared(&shared.lower[i][l]), inverse[l], sum);
        // Above the diagonal it is 0, even if a row has NaN.
        inverse[i] = i < column ? 0.0f : (i == column ? 1.0f : 0.0f) - sum;
        st_global_f32(matrix_row(p, first_row + i) + column, i < column ? 0.0f : inverse[i] * beta);
    }
}

// Factors of a token: a thread a token.
QG_DEVICE void write_factors(const SharedStorage& shared, const ChunkedParams& p, u64 first_row, bool features) {
    const u32 i = thread_index();
    const bool delta = p.attention.shape.flags & QG_FLAG_DELTA;
    float from_begin = 1.0f, to_end = 1.0f, of_chunk = 1.0f;
    if (!features) {
        const u32 resets = ld_shared(&shared.head_resets);
        const float own = ld_shared(&shared.sum[i]), all = ld_shared(&shared.sum[CHUNK - 1]);
        from_begin = decay_from_begin(resets, i, own);
        to_end = decay_between(resets, i, CHUNK - 1, own, all);
        of_chunk = decay_from_begin(resets, CHUNK - 1, all);
    }
    const float key = ld_shared(&shared.k_factor[i]), beta = delta ? 1.0f : ld_shared(&shared.beta[i]);
    st_global_f32x4(factors_of(p, first_row + i), f32x4{ld_shared(&shared.q_factor[i]) * from_begin, key * from_begin,
                                                        key * beta * to_end, of_chunk});
}

extern "C" __global__ void __launch_bounds__(QG_THREADS)
    qg_sm80_linear_attention_matrices(const __grid_constant__ ChunkedParams p) {
    SharedStorage& shared = *reinterpret_cast<SharedStorage*>(dynamic_shared());
    const u32 chunks = p.chunks.tokens / CHUNK, cta = cta_index().x;
    griddepcontrol_launch_dependents();
    griddepcontrol_wait();
    const Segment segment = Segment::of(p, cta / chunks);
    const u32 begin = cta % chunks * CHUNK;
    if (begin >= segment.count) return;
    const u32 count = least(segment.count - begin, CHUNK), first = segment.first + begin;
    const u64 first_row = row_of(p, segment, begin);
    const bool features = p.attention.shape.flags & QG_FLAG_DECAY_FEATURES;
    load_tokens(shared, p.attention, segment, first, count);
    if (features) sum_of_features(shared, p.attention, segment, first, count);
    cta_barrier();
    const u32 row = thread_index() / COLUMN_STEP, column = thread_index() % COLUMN_STEP;
    float kk[ROWS][COLUMNS] = {}, qk[ROWS][COLUMNS] = {};
    if (features)
        multiply<true>(shared, p.attention.shape.qk_dim, row, column, kk, qk);
    else
        multiply<false>(shared, p.attention.shape.qk_dim, row, column, kk, qk);
    finish_pairs(shared, p, first_row, features, row, column, kk, qk);
    cta_barrier();
    if (thread_index() < CHUNK) {
        write_factors(shared, p, first_row, features);
        if (p.attention.shape.flags & QG_FLAG_DELTA) invert(shared, p, first_row);
    }
}
