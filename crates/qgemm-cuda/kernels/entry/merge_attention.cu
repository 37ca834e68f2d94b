// Merge of partial attention results by log-sum-exp:
// D is the mean of parts weighed by exp(lse - max).
// A row is a head of a token.
// `row_threads` lanes of a warp share it, eight columns each.
// Shared memory has the weights of the CTA's rows.
#include "attention/numbers.cuh"
#include "epilogue/operands.cuh"

struct MergeAttentionParams {
    MergeAttentionShape shape;
    MergeAttentionPointers at;
};

// Parts whose loads are in flight together.
constexpr u32 AT_ONCE = QG_X_DTYPE == DTYPE_F32 ? 2 : 4;
constexpr float LOG2_E = 1.44269504f, LN_2 = 0.693147181f;

// Lanes of a row, and its weights.
struct Row {
    u32 lane, lanes;
    float* weights;
    u32 pitch;

    QG_DEVICE float* weight(const Row& row, u32 part) {
        return row.weights + part * row.pitch;
    }
};

// Log-sum-exps of the CTA's rows.
// Rows past the end have none.
QG_DEVICE void load_log_sums(const MergeAttentionParams& p, float* weights, u32 first, u32 rows) {
    const u8* stored = reinterpret_cast<const u8*>(p.at.partial_lse);
    for (u32 i = thread_index(); i < rows * p.shape.parts; i += QG_THREADS) {
        const u32 row = first + i % rows;
        const u64 at = (u64)(i / rows) * p.shape.rows + row;
        st_shared(&weights[i], row < p.shape.rows ? bits_to_f32(ld_global_u32(stored + at * 4)) : minus_infinity());
    }
    cta_barrier();
}

struct Weighted {
    float inverse_sum, lse;
};

// Turns log-sum-exps into weights.
// NaN spreads to the sum.
QG_DEVICE Weighted weigh(const Row& row, u32 parts) {
    float maximum = minus_infinity();
    const auto update = [&](float other) { maximum = other > maximum ? other : maximum; };
    for (u32 part = row.lane; part < parts; part += row.lanes) update(ld_shared(Row::weight(row, part)));
    for (u32 mask = row.lanes / 2; mask > 0; mask /= 2) update(shfl_xor(maximum, mask));
    const float base = maximum == minus_infinity() ? 0.0f : maximum;
    float sum = 0.0f;
    for (u32 part = row.lane; part < parts; part += row.lanes) {
        float* at = Row::weight(row, part);
        const float weight = ex2_approx((ld_shared(at) - base) * LOG2_E);
        st_shared(at, weight);
        sum += weight;
    }
    for (u32 mask = row.lanes / 2; mask > 0; mask /= 2) sum += shfl_xor(sum, mask);
    warp_barrier();
    return {sum == 0.0f ? 0.0f : 1.0f / sum, maximum + lg2_approx(sum) * LN_2};
}

// Weighted sum of eight columns, from element `first` on.
QG_DEVICE void merge(const MergeAttentionParams& p, const Row& row, float inverse_sum, u64 first, float (&sums)[8]) {
    using Stored = Eight<QG_X_DTYPE>;
    const u8* partial = reinterpret_cast<const u8*>(p.at.partial);
    const bool aligned = p.shape.flags & QG_FLAG_X_ALIGNED16;
    for (u32 part = 0; part < p.shape.parts; part += AT_ONCE) {
        float weights[AT_ONCE];
        Stored values[AT_ONCE];
#pragma unroll
        for (u32 i = 0; i < AT_ONCE; i++) {
            weights[i] = part + i < p.shape.parts ? ld_shared(Row::weight(row, part + i)) * inverse_sum : 0.0f;
            // Numbers without weight are not read.
            values[i] = Stored::zeros();
            const u64 element = first + (part + i) * p.at.part_stride;
            if (weights[i] != 0.0f) values[i] = Stored::load(partial + Stored::offset_of(element), aligned);
        }
#pragma unroll
        for (u32 i = 0; i < AT_ONCE; i++)
#pragma unroll
            for (u32 j = 0; j < 8; j++) sums[j] = fma_f32(weights[i], Stored::number(values[i], j), sums[j]);
    }
}

extern "C" __global__ void __launch_bounds__(QG_THREADS)
    qg_merge_attention(const __grid_constant__ MergeAttentionParams p) {
    float* weights = reinterpret_cast<float*>(dynamic_shared());
    const u32 lanes = p.shape.row_threads, cta_rows = QG_THREADS / lanes, own = thread_index() / lanes;
    const u32 first = cta_index().x * cta_rows, index = first + own;
    const Row row = {thread_index() % lanes, lanes, weights + own, cta_rows};
    griddepcontrol_launch_dependents();
    griddepcontrol_wait();
    load_log_sums(p, weights, first, cta_rows);
    const Weighted weighted = weigh(row, p.shape.parts);
    if (index >= p.shape.rows) return;
    const u64 token = index / p.shape.heads, head = index % p.shape.heads;
    const u64 from = token * p.at.token_stride + head * p.at.head_stride;
    const u64 to = token * p.at.d_token + head * p.at.d_head;
    for (u32 column = row.lane * 8; column < p.shape.dim; column += lanes * 8) {
        float sums[8] = {};
        merge(p, row, weighted.inverse_sum, from + column, sums);
        store_dense_run(p.shape.d_dtype, p.at.d, to + column, p.shape.flags & QG_FLAG_D_ALIGNED16, 8, sums);
    }
    if (p.shape.flags & QG_FLAG_LSE && row.lane == 0)
        st_global_u32(reinterpret_cast<u8*>(p.at.lse) + (u64)index * 4, f32_to_bits(weighted.lse));
}
