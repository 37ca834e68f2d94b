// Attention: end of a row, after its last key.
#pragma once
#include "attention/numbers.cuh"
#include "attention/problem.cuh"

constexpr float LOG2_E = 1.44269504f;
constexpr float LN_2 = 0.693147181f;

// Dequantization factor of the values of a KV head.
QG_DEVICE float value_factor(const AttentionParams& p, u32 kv_head) {
    return p.at.v_factors ? bits_to_f32(index_at(p.at.v_factors, kv_head)) : 1.0f;
}


// Log-sum-exp in base e, from row_max as a base-2
// exponent and `sum`, the sum of exp2(score − row_max).
QG_DEVICE float log_sum_exp(float row_max, float sum) {
    return sum == 0.0f ? minus_infinity() : (row_max + lg2_approx(sum)) * LN_2;
}

// Factor of a row's sums, and
// its log-sum-exp in base e.
struct RowEnd {
    float scale, lse;
};

// `row_max` is a base-2 exponent, `row_sum`
// the sum of exp2(score − row_max), `factor` that
// of values. A sink joins the denominator
// once, after all parts are combined.
QG_DEVICE RowEnd end_of_row(const AttentionParams& p, u32 head, float row_max, float row_sum, float factor) {
    if (p.at.sinks) {
        const float sink = bits_to_f32(index_at(p.at.sinks, head)) * LOG2_E;
        const float most = sink > row_max ? sink : row_max;
        // Avoid (−inf) − (−inf) = NaN when a row is fully masked.
        const float base = most == minus_infinity() ? 0.0f : most;
        const float rescale = ex2_approx(row_max - base);
        row_sum = fma_f32(row_sum, rescale, ex2_approx(sink - base));
        row_max = most;
        factor *= rescale;
    }
    return {row_sum == 0.0f ? 0.0f : factor / row_sum, log_sum_exp(row_max, row_sum)};
}

// Stores the log-sum-exp of a query of a head, if asked for.
QG_DEVICE void store_lse(const AttentionParams& p, u64 token, u32 head, const RowEnd& end) {
    if (!(p.shape.flags & QG_FLAG_LSE)) return;
    st_global_f32(reinterpret_cast<float*>(p.at.lse) + token * p.shape.heads + head, end.lse);
}

// Factor of a result with an output gate.
QG_DEVICE float sigmoid(float gate) {
    return 1.0f / (1.0f + ex2_approx(gate * -LOG2_E));
}

// First element of a query's gate of a head.
QG_DEVICE u64 gate_of(const AttentionParams& p, u64 token, u32 head) {
    return token * p.at.gate_token + head * p.at.gate_head;
}

// Multiplies two adjacent results by their gate, which is
// of 16-bit numbers and begins at `element`.
QG_DEVICE void multiply_by_gate(const AttentionParams& p, u64 element, float& low, float& high) {
    const u8* at = reinterpret_cast<const u8*>(p.at.gate) + element * 2;
    const u32 pair = p.shape.flags & QG_FLAG_GATE_ALIGNED ? ld_global_stream_u32(at) : ld_global_u16(at) | ld_global_u16(at + 2) << 16;
    const bool is_f16 = p.shape.dtype == DTYPE_F16;
    low *= sigmoid(is_f16 ? f16_to_f32(pair & 0xffffu) : bf16_to_f32(pair & 0xffffu));
    high *= sigmoid(is_f16 ? f16_to_f32(pair >> 16) : bf16_to_f32(pair >> 16));
}

// Stores eight results of a query of a head from
// `column` on, times their gate, rounded to the type of D.
QG_DEVICE void store_results(const AttentionParams& p, u64 token, u32 head, u32 column, float (&d)[8]) {
    if (p.at.gate) {
        float gate[8];
        load_eight(p.at.gate, p.shape.dtype, gate_of(p, token, head) + column, p.shape.flags & QG_FLAG_GATE_ALIGNED, gate);
#pragma unroll
        for (u32 i = 0; i < 8; i++) d[i] *= sigmoid(gate[i]);
    }
    const u64 element = token * p.at.d_token + head * p.at.d_head + column;
    u8* base = reinterpret_cast<u8*>(p.at.d);
    const bool aligned = p.shape.flags & QG_FLAG_D_ALIGNED;
    u32 words[8];
    if (p.shape.dtype == DTYPE_F32) {
        u8* to = base + element * 4;
#pragma unroll
        for (u32 i = 0; i < 8; i++) words[i] = f32_to_bits(d[i]);
        if (aligned) {
            st_global_v4(to, {words[0], words[1], words[2], words[3]});
            st_global_v4(to + 16, {words[4], words[5], words[6], words[7]});
            return;
        }
#pragma unroll
        for (u32 i = 0; i < 8; i++) st_global_u32(to + i * 4, words[i]);
        return;
    }
    u8* to = base + element * 2;
#pragma unroll
    for (u32 i = 0; i < 8; i++) words[i] = p.shape.dtype == DTYPE_F16 ? f32_to_f16(d[i]) : f32_to_bf16(d[i]);
    if (aligned) {
        st_global_v4(to, {words[0] | words[1] << 16, words[2] | words[3] << 16, words[4] | words[5] << 16,
                          words[6] | words[7] << 16});
        return;
    }
#pragma unroll
    for (u32 i = 0; i < 8; i++) st_global_u16(to + i * 2, words[i]);
}
