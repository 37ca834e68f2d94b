// Top-k and top-p of a row of logits: the last kept token,
// by histograms over digits of the orders.
#pragma once
#include "mainloop/sampling_sums.cuh"

// The last kept token: larger orders are kept,
// and equal ones up to its id.
struct Cut {
    u32 order, id;

    QG_DEVICE Cut all() { return {EXCLUDED + 1, NO_TOKEN}; }
    __device__ __forceinline__ bool keeps(u32 other_id, u32 other) const {
        return other > order || (other == order && other_id <= id);
    }
};

QG_DEVICE void clear_bins(SharedStorage& shared) {
    cta_barrier();
    for (u32 bin = thread_index(); bin < BINS; bin += QG_THREADS) st_shared(&shared.low[bin], 0u), st_shared(&shared.high[bin], 0u);
    cta_barrier();
}

QG_DEVICE void add_to_bin(SharedStorage& shared, u32 bin, u32 measure) {
    const u32 old = atomic_add_shared(&shared.low[bin], measure);
    if (old + measure < old) reduce_add_shared(&shared.high[bin], 1);
}

// The highest bin whose sum, with those above, reaches
// `wanted`, given the sum of all. `left` is what the
// bins above do not reach.
template <class W>
QG_DEVICE u32 find_bin(SharedStorage& shared, W&& wanted, u64& left) {
    const u32 first = BINS - 1 - thread_index() * THREAD_BINS;
    u64 sums[THREAD_BINS], own = 0;
#pragma unroll
    for (u32 i = 0; i < THREAD_BINS; i++) {
        sums[i] = (u64)ld_shared(&shared.high[first - i]) << 32 | ld_shared(&shared.low[first - i]);
        own += sums[i];
    }
    const Prefix of_all = cta_prefix(shared, own);
    const u64 target = wanted(of_all.total);
    u64 before = of_all.before;
#pragma unroll
    for (u32 i = 0; i < THREAD_BINS; i++) {
        if (before < target && target <= before + sums[i]) {
            st_shared(&shared.found, first - i);
            st_shared(&shared.left, target - before);
        }
        before += sums[i];
    }
    cta_barrier();
    left = ld_shared(&shared.left);
    return ld_shared(&shared.found);
}

// Keeps as few of the most likely tokens as have the sum
// of `measure` that `wanted` says, given the sum of all.
template <class F, class W>
QG_DEVICE Cut cut_row(SharedStorage& shared, const Row& row, const Cut& of, F&& measure, W&& wanted) {
    u32 prefix = 0, shift = 32;
    u64 left = 0;
#pragma unroll 1
    for (u32 digit = 0; digit < 3; digit++) {
        const u32 width = digit < 2 ? 11 : 10, above = shift;
        shift -= width;
        clear_bins(shared);
        row.each(0, row.vocabulary, thread_index(), QG_THREADS, [&](u32 id, u32 order) {
            if ((u64)order >> above != prefix || !of.keeps(id, order)) return;
            const u32 own = measure(order);
            if (own != 0) add_to_bin(shared, order >> shift & ((1u << width) - 1), own);
        });
        cta_barrier();
        const u32 bin = find_bin(shared, [&](u64 total) { return digit == 0 ? wanted(total) : left; }, left);
        prefix = prefix << width | bin;
    }
    // Of equal orders, those with the lowest ids.
    const auto of_ties = [&](u32 id, u32 order) { return order == prefix && of.keeps(id, order) ? measure(order) : 0u; };
    return {prefix, find_token(shared, row, of_ties, [&](u64) { return left; })};
}
