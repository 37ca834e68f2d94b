// Attention: end of a row, after its last key.
#pragma once
#include "mainloop/attention_keys.cuh"

constexpr float LOG2_E = 1.44269504f;

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
