// Attention: products of Q and
// K, as base-2 exponents.
#pragma once
#include "attention/problem.cuh"

// Soft cap of a scaled score, which is a base-2 exponent.
QG_DEVICE float bounded(const AttentionParams& p, float product) {
    if (!(p.shape.flags & QG_FLAG_SOFT_CAP)) return product;
    // tanh |x| = (1 - e) / (1 + e), with e = exp(-2 |x|).
    const float magnitude = product < 0.0f ? -product : product;
    const float e = ex2_approx(magnitude * -2.88539008f);
    const float tanh = (1.0f - e) / (1.0f + e);
    return (product < 0.0f ? -tanh : tanh) * p.shape.soft_cap;
}

// Softmax scale times the dequantization factor of the KV head.
QG_DEVICE float key_factor(const AttentionParams& p, u32 kv_head) {
    const float own = p.at.k_factors ? bits_to_f32(index_at(p.at.k_factors, kv_head)) : 1.0f;
    return p.shape.factor * own;
}
