// Linear attention in chunks: states and
// outputs, chunk by chunk. A CTA has 64 rows
// (values) of a head's state for a sequence, 16
// a warp. The state stays in registers, in the
// layout of accumulators; these are also A
// operands of the products with queries and
// keys.
#include "recurrence/chunk_operands.cuh"

// Tiles of eight features of a state, and of
// eight tokens.
constexpr u32 STATE_TILES = MOST_DIM / 8, TOKEN_TILES = CHUNK / 8;

struct SharedStorage {
    ChunkPlanes planes;
    // Of this chunk and the next, in turn.
    ChunkNumbers numbers[2];
    // Values, then outputs: [token][row].
    float v[CHUNK][CTA_ROWS + 4];
};
static_assert(sizeof(SharedStorage) == QG_SHARED_BYTES, "the host computes another size");

using State = float[STATE_TILES][4];
using Tokens8 = float[TOKEN_TILES][4];

// Rows and features of a thread: element e of a
// tile.
QG_DEVICE u32 row_of_element(u32 lane, u32 e) {
    return lane / 4 + e / 2 * 8;
}
QG_DEVICE u32 column_of_element(u32 lane, u32 tile, u32 e) {
    return tile * 8 + lane % 4 * 2 + e % 2;
}

// Address of the states of the CTA's head
// between segments.
QG_DEVICE u64 between_segments(const ChunkedParams& p, const Segment& segment) {
    const LinearAttentionShape& shape = p.attention.shape;
    return p.chunks.states + ((u64)segment.sequence * shape.heads + segment.head) * shape.v_dim * shape.qk_dim * 4;
}

#if !QG_DECAY_FEATURES
QG_DEVICE void clear(State& s) {
#pragma unroll
    for (u32 tile = 0; tile < STATE_TILES; tile++)
#pragma unroll
        for (u32 e = 0; e < 4; e++) s[tile][e] = 0.0f;
}
#endif

QG_DEVICE void load_state(const LinearAttentionParams& p, u64 state, u32 first_row, u32 lane, State& s) {
#pragma unroll
    for (u32 tile = 0; tile < STATE_TILES; tile++)
#pragma unroll
        for (u32 e = 0; e < 4; e++) {
            const u32 row = first_row + row_of_element(lane, e), column = column_of_element(lane, tile, e);
            const bool is_there = state && row < p.shape.v_dim && column < p.shape.qk_dim;
            const float* from = reinterpret_cast<const float*>(state) + (u64)row * p.shape.qk_dim + column;
            s[tile][e] = is_there ? ld_global_cg_f32(from) : 0.0f;
        }
}

QG_DEVICE void store_state(const LinearAttentionParams& p, u64 state, u32 first_row, u32 lane, const State& s) {
#pragma unroll
    for (u32 tile = 0; tile < STATE_TILES; tile++)
#pragma unroll
        for (u32 e = 0; e < 4; e++) {
            const u32 row = first_row + row_of_element(lane, e), column = column_of_element(lane, tile, e);
            if (row < p.shape.v_dim && column < p.shape.qk_dim)
                st_global_f32(reinterpret_cast<float*>(state) + (u64)row * p.shape.qk_dim + column, s[tile][e]);
        }
}

// acc += state · keysᵀ, and the same for
// queries.
QG_DEVICE void multiply_state(const State& s, const ChunkPlanes& planes, u32 qk_dim, bool delta, u32 lane,
                              Tokens8& of_keys, Tokens8& of_queries) {
#pragma unroll
    for (u32 step = 0; step < MOST_DIM / 16; step++) {
        if (step * 16 >= qk_dim) break;
        const SplitA a = SplitA::of(s[step * 2], s[step * 2 + 1]);
#pragma unroll
        for (u32 pair = 0; pair < TOKEN_TILES; pair += 2) {
            if (delta) multiply_rows(of_keys[pair], of_keys[pair + 1], a, planes.key, pair * 8, step * 16, lane);
            multiply_rows(of_queries[pair], of_queries[pair + 1], a, planes.query, pair * 8, step * 16, lane);
        }
    }
}

// acc += x · mᵀ for the tokens of a chunk.
QG_DEVICE void multiply_tokens(Tokens8& acc, const Tokens8& x, const Plane<NARROW, 2>& m, u32 lane) {
#pragma unroll
    for (u32 step = 0; step < CHUNK / 16; step++) {
        const SplitA a = SplitA::of(x[step * 2], x[step * 2 + 1]);
#pragma unroll
        for (u32 pair = 0; pair < TOKEN_TILES; pair += 2)
            multiply_rows(acc[pair], acc[pair + 1], a, m, pair * 8, step * 16, lane);
    }
}

// Decays the state and adds the tokens' updates.
// f32 additions round to nearest, while the MMA
// truncates: a state may live for thousands of
// chunks.
QG_DEVICE void update_state(State& s, const Tokens8& updates, const ChunkPlanes& planes, const ChunkNumbers& numbers,
                            u32 qk_dim, u32 lane) {
    SplitA a[CHUNK / 16];
#pragma unroll
    for (u32 step = 0; step < CHUNK / 16; step++) a[step] = SplitA::of(updates[step * 2], updates[step * 2 + 1]);
#if QG_DECAY_FEATURES
    const auto& keys = planes.key_of_state;
#else
    const auto& keys = planes.key;
    const float decay = ld_shared(&numbers.factors[0].decay);
    if (decay == 0.0f) clear(s);
#endif
#pragma unroll
    for (u32 pair = 0; pair < STATE_TILES; pair += 2) {
        if (pair * 8 >= qk_dim) break;
        float sums[2][4] = {};
#pragma unroll
        for (u32 step = 0; step < CHUNK / 16; step++)
            multiply_columns(sums[0], sums[1], a[step], keys, step * 16, pair * 8, lane);
#pragma unroll
        for (u32 i = 0; i < 2; i++)
#pragma unroll
            for (u32 e = 0; e < 4; e++) {
                float& own = s[pair + i][e];
#if QG_DECAY_FEATURES
                own = scaled(own, ld_shared(&planes.decay[column_of_element(lane, pair + i, e)])) + sums[i][e];
#else
                own = fma_f32(own, decay, sums[i][e]);
#endif
            }
    }
}

// Stores the warp's outputs: through shared
// memory, whose values of these rows are read. A
// lane stores eight rows of a token.
QG_DEVICE void store_outputs(SharedStorage& shared, const LinearAttentionParams& p, const Segment& segment,
                             const Tokens8& outputs, u32 cta_row, u32 warp_row, u32 begin, u32 count, u32 lane) {
#pragma unroll
    for (u32 tile = 0; tile < TOKEN_TILES; tile++)
#pragma unroll
        for (u32 e = 0; e < 4; e++)
            st_shared(&shared.v[column_of_element(lane, tile, e)][warp_row + row_of_element(lane, e)], outputs[tile][e]);
    warp_barrier();
    const bool aligned = p.shape.flags & QG_FLAG_X_ALIGNED16;
#pragma unroll
    for (u32 at = lane; at < CHUNK * (WARP_ROWS / 8); at += 32) {
        const u32 i = at / (WARP_ROWS / 8), row = warp_row + at % (WARP_ROWS / 8) * 8;
        if (i >= count || cta_row + row >= p.shape.v_dim) continue;
        const u64 d = (segment.first + begin + i) * p.at.d_token + segment.head * p.at.d_head + cta_row + row;
        const f32x4* from = reinterpret_cast<const f32x4*>(&shared.v[i][row]);
        const f32x4 low = ld_shared(from), high = ld_shared(from + 1);
        const float numbers[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
        store_dense_run(QG_X_DTYPE, p.at.d, d, aligned, p.shape.v_dim - cta_row - row, numbers);
    }
}

#if !QG_DECAY_FEATURES
// Multiplies by a factor of each token.
template <typename Factor>
QG_DEVICE void scale_tokens(Tokens8& x, const ChunkNumbers& numbers, u32 lane, Factor factor_of) {
#pragma unroll
    for (u32 tile = 0; tile < TOKEN_TILES; tile++)
#pragma unroll
        for (u32 e = 0; e < 2; e++) {
            const TokenFactors* factors = &numbers.factors[column_of_element(lane, tile, e)];
            const float factor = factor_of(ld_shared(reinterpret_cast<const f32x4*>(factors)));
            x[tile][e] = scaled(x[tile][e], factor);
            x[tile][e + 2] = scaled(x[tile][e + 2], factor);
        }
}
#endif

// A chunk of the warp's rows. Factors of tokens
// are applied to sums, so that products read
// queries and keys as they are stored.
QG_DEVICE void advance(SharedStorage& shared, const LinearAttentionParams& p, const Segment& segment, State& s,
                       float skip, u32 cta_row, u32 warp_row, u32 begin, u32 count, u32 lane) {
    const ChunkNumbers& numbers = shared.numbers[begin / CHUNK % 2];
    const bool delta = p.shape.flags & QG_FLAG_DELTA;
    Tokens8 updates = {}, outputs = {}, of_keys = {};
    multiply_state(s, shared.planes, p.shape.qk_dim, delta, lane, of_keys, outputs);
#if !QG_DECAY_FEATURES
    scale_tokens(outputs, numbers, lane, [](const f32x4& factors) { return factors.x; });
    scale_tokens(of_keys, numbers, lane, [](const f32x4& factors) { return factors.y; });
#endif
#pragma unroll
    for (u32 tile = 0; tile < TOKEN_TILES; tile++)
#pragma unroll
        for (u32 e = 0; e < 4; e++) {
            const float v = ld_shared(&shared.v[column_of_element(lane, tile, e)][warp_row + row_of_element(lane, e)]);
            outputs[tile][e] = fma_f32(skip, v, outputs[tile][e]);
            of_keys[tile][e] = v - of_keys[tile][e];
            if (!delta) updates[tile][e] = v;
        }
    if (delta) multiply_tokens(updates, of_keys, numbers.matrices[INVERSE], lane);
    multiply_tokens(outputs, updates, numbers.matrices[OUTPUTS], lane);
#if !QG_DECAY_FEATURES
    scale_tokens(updates, numbers, lane, [](const f32x4& factors) { return factors.z; });
#endif
    update_state(s, updates, shared.planes, numbers, p.shape.qk_dim, lane);
    store_outputs(shared, p, segment, outputs, cta_row, warp_row, begin, count, lane);
}

extern "C" __global__ void __launch_bounds__(QG_THREADS)
    qg_sm80_linear_attention_chunks(const __grid_constant__ ChunkedParams p) {
    SharedStorage& shared = *reinterpret_cast<SharedStorage*>(dynamic_shared());
    const LinearAttentionParams& attention = p.attention;
    const u32 cta = cta_index().x, lane = thread_index() % 32, warp_row = thread_index() / 32 * WARP_ROWS;
    const u32 cta_row = cta % attention.shape.slices * CTA_ROWS;
    griddepcontrol_launch_dependents();
    griddepcontrol_wait();
    const Segment segment = Segment::of(p, cta / attention.shape.slices);
    if (segment.count == 0) return;
    const u64 stored = state_of(attention, segment.sequence, segment.head);
    const u64 between = between_segments(p, segment);
    const u64 from = p.chunks.first ? between : attention.shape.flags & QG_FLAG_FROM_ZERO ? 0 : stored;
    const u64 to = segment.is_last ? stored : between;
    const bool has_rows = cta_row + warp_row < attention.shape.v_dim;
    const float skip = attention.at.skip ? bits_to_f32(index_at(attention.at.skip, segment.head)) : 0.0f;
    State s;
    load_state(attention, from, cta_row + warp_row, lane, s);
    ChunkOperands operands;
    ChunkOperands::load(operands, attention, segment, cta_row, 0, least(segment.count, CHUNK));
    copy_numbers(shared.numbers[0], p, row_of(p, segment, 0));
    cp_async_commit_group();
#pragma unroll 1
    for (u32 begin = 0; begin < segment.count; begin += CHUNK) {
        const u32 next = begin + CHUNK, count = least(segment.count - begin, CHUNK);
        // What this chunk reads is not read any more.
        cta_barrier();
#if QG_DECAY_FEATURES
        copy_decayed(shared.planes, p, row_of(p, segment, begin));
#endif
        cp_async_commit_group();
        if (ChunkOperands::has_eights(attention))
            ChunkOperands::store(operands, shared.planes, shared.v);
        else
            ChunkOperands::store_unaligned(attention, segment, cta_row, segment.first + begin, count, shared.planes, shared.v);
        if (next < segment.count) {
            ChunkOperands::load(operands, attention, segment, cta_row, next, least(segment.count - next, CHUNK));
            copy_numbers(shared.numbers[next / CHUNK % 2], p, row_of(p, segment, next));
        }
        cp_async_commit_group();
        // All but the next chunk's numbers.
        cp_async_wait_group<1>();
        cta_barrier();
        if (has_rows) advance(shared, attention, segment, s, skip, cta_row, warp_row, begin, count, lane);
    }
    if (to) store_state(attention, to, cta_row + warp_row, lane, s);
}
