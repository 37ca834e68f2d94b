// Linear attention in chunks (the WY form of the delta rule):
// what the kernel of the matrices leaves for the kernel of the states.
//
// With the decay Γ(i, j) from token j to token i, of a chunk's
// tokens:
//   T = (1 + strictly lower(β_i Γ(i, j) k_i·k_j))⁻¹ diag(β)
//   P = lower(Γ(i, j) q_i·k_j)
// The updates of all tokens are then T (V - K S), for keys that
// decay from the chunk's begin, and their outputs
// Q S + P updates. Without the delta term updates are V, and β
// is a factor of the columns of P.
#pragma once
#include "recurrence/problem.cuh"

// Tokens of a chunk.
constexpr u32 CHUNK = 32;

struct ChunkedParams {
    LinearAttentionParams attention;
    LinearAttentionChunks chunks;
};

// Factors of a token's query and key. With a decay a head they
// contain it: from the chunk's begin, or to its end for the key
// that enters the state.
struct alignas(16) TokenFactors {
    float query, key, key_of_state;
    // Decay of the whole chunk.
    float decay;
};

// Sequence and head of a CTA in a segment.
struct Segment {
    u32 sequence, head, key_head;
    // First token and count in this segment, from a multiple of
    // the chunk on.
    u32 first, count;
    // Whether the sequence ends in it.
    bool is_last;

    QG_DEVICE Segment of(const ChunkedParams& p, u32 sequence_and_head) {
        const LinearAttentionShape& shape = p.attention.shape;
        Segment segment;
        segment.head = sequence_and_head % shape.heads, segment.sequence = sequence_and_head / shape.heads;
        segment.key_head = key_head_of(shape, segment.head);
        const Tokens tokens = Tokens::of(p.attention, segment.sequence);
        const u32 left = beyond(tokens.count, p.chunks.first);
        segment.first = tokens.first + p.chunks.first;
        segment.count = least(left, p.chunks.tokens);
        segment.is_last = left <= p.chunks.tokens;
        return segment;
    }
};

// Row of a token in the workspace.
QG_DEVICE u64 row_of(const ChunkedParams& p, const Segment& segment, u32 token) {
    return ((u64)segment.sequence * p.attention.shape.heads + segment.head) * p.chunks.tokens + token;
}

// A matrix of a chunk, of which a token has a row.
enum ChunkMatrix : u32 { INVERSE, OUTPUTS, CHUNK_MATRICES };

// Address of an element: its hi, or its lo. A token has
// [matrix][part][CHUNK] bf16 numbers.
QG_DEVICE u8* matrix_at(const ChunkedParams& p, u64 row, u32 matrix, u32 part, u32 column) {
    return reinterpret_cast<u8*>(p.chunks.matrices) + (((row * CHUNK_MATRICES + matrix) * 2 + part) * CHUNK + column) * 2;
}

QG_DEVICE f32x4* factors_of(const ChunkedParams& p, u64 row) {
    return reinterpret_cast<f32x4*>(p.chunks.factors) + row;
}

// Sums of log-decays from the last reset on, and the tokens
// with a decay of 0 as bits. NaN in a sum stays.
struct Decays {
    float sum;
    u32 resets;

    QG_DEVICE Decays none() { return {0.0f, 0}; }
    QG_DEVICE void add(Decays& decays, u32 token, float g) {
        const bool is_reset = decay_of_log(g) == 0.0f;
        decays.sum = is_reset ? 0.0f : decays.sum + g;
        if (is_reset) decays.resets |= 1u << token;
    }
};

// Decay from token `from` (exclusive) to token `to` ≥ `from`,
// which have these sums.
QG_DEVICE float decay_between(u32 resets, u32 from, u32 to, float from_sum, float to_sum) {
    const u32 later = from + 1 < CHUNK ? resets >> (from + 1) << (from + 1) : 0;
    const u32 up_to = to + 1 < CHUNK ? later & ((1u << (to + 1)) - 1u) : later;
    if (up_to) return 0.0f;
    const float g = to_sum - from_sum;
    return decay_of_log(g > 0.0f ? 0.0f : g);
}

// Decay from the chunk's begin to token `to`.
QG_DEVICE float decay_from_begin(u32 resets, u32 to, float to_sum) {
    const u32 up_to = to + 1 < CHUNK ? resets & ((1u << (to + 1)) - 1u) : resets;
    return up_to ? 0.0f : decay_of_log(to_sum);
}

// A factor 0 makes 0, even of NaN.
QG_DEVICE float scaled(float value, float factor) {
    return factor == 0.0f ? 0.0f : value * factor;
}
