// Linear attention, token by token (gated delta rule, KDA, Mamba-2).
// A CTA has some rows (values) of a head's state for a sequence.
// `row_lanes` lanes of a warp share a row, 16 columns each.
// The state stays in registers. Tokens pass through shared
// memory a chunk at a time.
// The output uses the state before the update:
// S q = (decayed S) q + u (k q), so both sums of a row
// are reduced together.
#include "recurrence/chunk.cuh"

using State = float[ROWS][COLUMNS];

QG_DEVICE u8* address_of(const LinearAttentionParams& p, const Place& place, u64 state, u32 i, u32 group) {
    const u64 element = (u64)(place.first_row + Place::row(place, i)) * p.shape.qk_dim + Place::column(place, group);
    return reinterpret_cast<u8*>(state + element * 4);
}

QG_DEVICE bool has_group(const LinearAttentionParams& p, const Place& place, u32 i, u32 group) {
    return place.first_row + Place::row(place, i) < p.shape.v_dim && Place::column(place, group) < p.shape.qk_dim;
}

QG_DEVICE void load_state(const LinearAttentionParams& p, const Place& place, u64 state, State& s) {
#pragma unroll
    for (u32 i = 0; i < ROWS; i++)
#pragma unroll
        for (u32 group = 0; group < GROUPS; group++) {
            u32x4 v = {};
            if (state && has_group(p, place, i, group)) v = ld_global_once_v4(address_of(p, place, state, i, group));
            const u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
            for (u32 j = 0; j < 4; j++) s[i][group * 4 + j] = bits_to_f32(words[j]);
        }
}

QG_DEVICE void store_state(const LinearAttentionParams& p, const Place& place, u64 state, const State& s) {
#pragma unroll
    for (u32 i = 0; i < ROWS; i++)
#pragma unroll
        for (u32 group = 0; group < GROUPS; group++) {
            const float* four = &s[i][group * 4];
            if (has_group(p, place, i, group))
                st_global_v4(address_of(p, place, state, i, group), u32x4{f32_to_bits(four[0]), f32_to_bits(four[1]),
                                                                          f32_to_bits(four[2]), f32_to_bits(four[3])});
        }
}

QG_DEVICE void load_four(const float* from, float* to) {
    const f32x4 v = ld_shared(reinterpret_cast<const f32x4*>(from));
    to[0] = v.x, to[1] = v.y, to[2] = v.z, to[3] = v.w;
}

// Decay 0 forgets everything, even NaN.
QG_DEVICE float decayed(float s, float decay) {
    return decay == 0.0f ? 0.0f : s * decay;
}
QG_DEVICE void forget(State& s) {
#pragma unroll
    for (u32 i = 0; i < ROWS; i++)
#pragma unroll
        for (u32 j = 0; j < COLUMNS; j++) s[i][j] = 0.0f;
}

// One token: writes the outputs of the thread's rows.
template <bool DELTA, bool FEATURES>
QG_DEVICE void step(const LinearAttentionParams& p, const Place& place, const Chunk& chunk, u32 token, float skip,
                    State& s, float (&out)[ROWS]) {
    float k[COLUMNS], of_key[ROWS] = {}, of_query[ROWS] = {};
    const float single = FEATURES ? 1.0f : ld_shared(&chunk.decay[token]);
    if (single == 0.0f) forget(s);
#pragma unroll
    for (u32 group = 0; group < GROUPS; group++) {
        const u32 at = token * chunk.pitch + Place::column(place, group);
        float q[4], decay[4];
        load_four(&chunk.k[at], &k[group * 4]);
        load_four(&chunk.q[at], q);
        if constexpr (FEATURES) load_four(&chunk.decay[at], decay);
#pragma unroll
        for (u32 i = 0; i < ROWS; i++)
#pragma unroll
            for (u32 j = 0; j < 4; j++) {
                float& own = s[i][group * 4 + j];
                own = FEATURES ? decayed(own, decay[j]) : own * single;
                if constexpr (DELTA) of_key[i] = fma_f32(own, k[group * 4 + j], of_key[i]);
                of_query[i] = fma_f32(own, q[j], of_query[i]);
            }
    }
    for (u32 mask = place.lanes / 2; mask > 0; mask /= 2)
#pragma unroll
        for (u32 i = 0; i < ROWS; i++) {
            if constexpr (DELTA) of_key[i] += shfl_xor(of_key[i], mask);
            of_query[i] += shfl_xor(of_query[i], mask);
        }
    const float beta = ld_shared(&chunk.beta[token]), qk = ld_shared(&chunk.qk[token]);
#pragma unroll
    for (u32 i = 0; i < ROWS; i++) {
        const float v = ld_shared(&chunk.v[token * place.cta_rows + Place::row(place, i)]);
        const float update = beta * (DELTA ? v - of_key[i] : v);
        out[i] = fma_f32(skip, v, fma_f32(update, qk, of_query[i]));
#pragma unroll
        for (u32 j = 0; j < COLUMNS; j++) s[i][j] = fma_f32(update, k[j], s[i][j]);
    }
}

// Tokens of a chunk. The first `pending` have no output.
template <bool DELTA, bool FEATURES>
QG_DEVICE void recur(const LinearAttentionParams& p, const Place& place, const Chunk& chunk, u32 first, u32 count,
                     u32 pending, float skip, State& s) {
    // Copies of the loop body would be more code than
    // one token of decode.
#pragma unroll 1
    for (u32 token = 0; token < count; token++) {
        float out[ROWS];
        step<DELTA, FEATURES>(p, place, chunk, token, skip, s, out);
        if (token < pending) continue;
#pragma unroll
        for (u32 i = 0; i < ROWS; i++) {
            const u32 row = place.first_row + Place::row(place, i);
            const u64 d = (first + token) * p.at.d_token + place.head * p.at.d_head + row;
            // Lanes of a row have equal sums.
            if (place.lane == i % place.lanes && row < p.shape.v_dim) store_dense(QG_X_DTYPE, p.at.d, d, out[i]);
        }
    }
}

extern "C" __global__ void __launch_bounds__(QG_THREADS)
    qg_linear_attention(const __grid_constant__ LinearAttentionParams p) {
    const u32 lanes = p.shape.row_lanes, cta_rows = ROWS * QG_THREADS / lanes, cta = cta_index().x;
    const u32 slice = cta % p.shape.slices, of_sequence = cta / p.shape.slices;
    const u32 head = of_sequence % p.shape.heads, sequence = of_sequence / p.shape.heads;
    const u32 key_head = key_head_of(p.shape, head);
    const Place place = {head, key_head, slice * cta_rows, lanes, thread_index() % lanes, cta_rows};
    const Chunk chunk = Chunk::of(p, place);
    const bool from_zero = p.shape.flags & QG_FLAG_FROM_ZERO;
    griddepcontrol_launch_dependents();
    griddepcontrol_wait();
    const Tokens tokens = Tokens::of(p, sequence);
    if (tokens.count == 0) return;
    const u64 state = state_of(p, sequence, head);
    State s;
    load_state(p, place, from_zero ? 0 : state, s);
    if (state && from_zero && tokens.advance == 0) store_state(p, place, state, s);
    const float skip = p.at.skip ? bits_to_f32(index_at(p.at.skip, head)) : 0.0f;
    for (u32 begin = 0; begin < tokens.count;) {
        // A chunk ends where the state is stored.
        const u32 end = begin < tokens.advance ? tokens.advance : tokens.count;
        const u32 count = least(end - begin, p.shape.chunk), first = tokens.first + begin;
        const u32 pending = beyond(tokens.pending, begin);
        cta_barrier();
        load_chunk(p, place, chunk, first, count);
        cta_barrier();
        const bool features = p.shape.flags & QG_FLAG_DECAY_FEATURES;
        if (p.shape.flags & QG_FLAG_DELTA) {
            if (features)
                recur<true, true>(p, place, chunk, first, count, pending, skip, s);
            else
                recur<true, false>(p, place, chunk, first, count, pending, skip, s);
        } else {
            if (features)
                recur<false, true>(p, place, chunk, first, count, pending, skip, s);
            else
                recur<false, false>(p, place, chunk, first, count, pending, skip, s);
        }
        begin += count;
        if (state && begin == tokens.advance) store_state(p, place, state, s);
    }
}
