// Linear attention: tokens of a sequence, its state's slot,
// and the decay of a token. Indices are clamped: no content of
// offsets, slots or counts makes an access go out of bounds.
#pragma once
#include "attention/numbers.cuh"
#include "epilogue/activation.cuh"
#include "epilogue/operands.cuh"

struct LinearAttentionParams {
    LinearAttentionShape shape;
    LinearAttentionPointers at;
};

// Tokens of a sequence.
struct Tokens {
    u32 first, count;
    // Tokens that enter the stored state,
    // and first tokens without output.
    u32 advance, pending;

    QG_DEVICE Tokens of(const LinearAttentionParams& p, u32 sequence) {
        const LinearAttentionShape& shape = p.shape;
        Tokens tokens = {sequence * shape.most_tokens, shape.most_tokens, 0, 0};
        if (p.at.q_offsets) {
            tokens.first = least(index_at(p.at.q_offsets, sequence), shape.tokens);
            const u32 end = least(index_at(p.at.q_offsets, sequence + 1), shape.tokens);
            tokens.count = least(beyond(end, tokens.first), shape.most_tokens);
        }
        tokens.advance = tokens.count;
        if (p.at.advance) tokens.advance = least(index_at(p.at.advance, sequence), tokens.count);
        if (p.at.pending) tokens.pending = index_at(p.at.pending, sequence);
        return tokens;
    }
};

// Address of a head's state; 0 without a slot.
QG_DEVICE u64 state_of(const LinearAttentionParams& p, u32 sequence, u32 head) {
    // A negative slot is beyond all slots.
    const u32 slot = p.at.slots ? index_at(p.at.slots, sequence) : sequence;
    if (slot >= p.shape.slots) return 0;
    return p.at.states + (slot * p.at.slot_stride + (u64)head * p.shape.v_dim * p.shape.qk_dim) * 4;
}

// exp(x) of any sign.
QG_DEVICE float exp_f32(float x) {
    return x > 0.0f ? 1.0f / exp_nonpositive(-x) : exp_nonpositive(x);
}

// Given log-decay of a token, or `a`.
QG_DEVICE float given_decay_of(const LinearAttentionParams& p, u32 token, u32 index) {
    return load_dense(p.shape.a_dtype, p.at.decay, token * p.at.decay_token + index);
}

// Time step: softplus(a + dt_bias).
QG_DEVICE float time_step_of(const LinearAttentionParams& p, u32 token, u32 index) {
    return softplus(given_decay_of(p, token, index) + bits_to_f32(index_at(p.at.dt_bias, index)));
}

// Log-decay `index` of a token, of the head's parameters, at most 0.
// NaN stays NaN.
QG_DEVICE float log_decay_of(const LinearAttentionParams& p, u32 token, u32 head, u32 index) {
    const float g = p.at.a_log ? -exp_f32(bits_to_f32(index_at(p.at.a_log, head))) * time_step_of(p, token, index)
                               : given_decay_of(p, token, index);
    return g > 0.0f ? 0.0f : g;
}

// exp(g) of a log-decay.
QG_DEVICE float decay_of_log(float g) {
    return g != g ? g : exp_nonpositive(g);
}

// Factor of a head's update.
QG_DEVICE float beta_of(const LinearAttentionParams& p, u32 token, u32 head) {
    if (p.shape.flags & QG_FLAG_TIME_STEP) return time_step_of(p, token, head);
    if (!p.at.beta) return 1.0f;
    const float beta = bits_to_f32(index_at(p.at.beta, token * p.at.beta_token + head));
    return p.shape.flags & QG_FLAG_SIGMOID ? sigmoid(beta) : beta;
}

// Key head of a value head.
QG_DEVICE u32 key_head_of(const LinearAttentionShape& shape, u32 head) {
    return shape.flags & QG_FLAG_TILED_HEADS ? head % (shape.heads / shape.group) : head / shape.group;
}
