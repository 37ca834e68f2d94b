// Sparse-attention indexer: bins of equal width
// over scores. A CTA finds a score bound with them
// and sorts candidates while bins have few entries.
#pragma once
#include "atoms/reciprocal.cuh"
#include "mainloop/indexer_ranks.cuh"
#include "mainloop/warp_max.cuh"

// Order-preserving score bits of a ranked value.
QG_DEVICE u32 place_of(u64 number) {
    return (u32)(number >> 32);
}

// BINS bins over the ordered scores `low ..= high`, ascending.
struct Bins {
    u32 low, high;
    // Bins per unit of score, in 2^-32.
    u32 scale;

    QG_DEVICE Bins between(u32 low, u32 high) {
        // With fewer distinct scores than bins, each has its bin.
        const u32 range = high - low;
        return {low, high, range < BINS ? ~0u : (u32)(4294966272.0f * BINS * rcp_approx((float)range))};
    }
    // Bin of an ordered score within the range.
    __device__ __forceinline__ u32 at(u32 place) const {
        return least((u32)((u64)(place - low + 1) * scale >> 32), BINS - 1);
    }
    // Lowest ordered score of a bin.
    __device__ __forceinline__ u32 first(u32 bin) const {
        return bin == 0 ? low : low - 1 + (u32)((((u64)bin << 32) + scale - 1) / scale);
    }
    __device__ __forceinline__ u32 last(u32 bin) const { return bin + 1 < BINS ? first(bin + 1) - 1 : high; }
};

QG_DEVICE void clear_bins(SharedStorage& shared) {
    cta_barrier();
    for (u32 i = thread_index(); i < BINS; i += QG_THREADS) st_shared(&shared.bins[i], 0u);
    cta_barrier();
}

// Bins between the minimum and maximum over all threads;
// 0 means no score. `high` is 0 if no thread has a score.
template <u32 COUNT, class F>
QG_DEVICE Bins bins_of_all(SharedStorage& shared, F&& place) {
    u32 high = 0, below = 0;
#pragma unroll
    for (u32 i = 0; i < COUNT; i++) {
        const u32 own = place(i);
        if (own > high) high = own;
        // Minimum as the complement of the maximum complement.
        if (own != 0 && ~own > below) below = ~own;
    }
    high = warp_max(high), below = warp_max(below);
    const u32 lane = thread_index() % 32, warp = thread_index() / 32;
    static_assert(WARPS <= 32 && 2 * WARPS <= BINS, "what warps have found lies in the place of bins");
    cta_barrier();
    if (lane == 0) st_shared(&shared.bins[warp], high), st_shared(&shared.bins[WARPS + warp], below);
    cta_barrier();
    high = warp_max(lane < WARPS ? ld_shared(&shared.bins[lane]) : 0);
    below = warp_max(lane < WARPS ? ld_shared(&shared.bins[WARPS + lane]) : 0);
    return Bins::between(~below, high);
}

// An ordered score that at least `wanted` scores
// reach, and at most `most` unless scores are
// equal. Returns 0 if no more than `wanted` exist.
template <u32 COUNT>
QG_DEVICE u32 find_place(SharedStorage& shared, const u32 (&places)[COUNT], u32 wanted, u32 most) {
    Bins bins = bins_of_all<COUNT>(shared, [&](u32 i) { return places[i]; });
    for (u32 above = 0;;) {
        clear_bins(shared);
#pragma unroll
        for (u32 i = 0; i < COUNT; i++) {
            if (places[i] != 0 && places[i] >= bins.low && places[i] <= bins.high) reduce_add_shared(&shared.bins[bins.at(places[i])], 1);
        }
        const u32 all = find_bin(shared, wanted - above);
        if (above == 0 && all <= wanted) return 0;
        above += ld_shared(&shared.above);
        const u32 bin = ld_shared(&shared.bin), low = bins.first(bin), high = bins.last(bin);
        if (low == high || above + ld_shared(&shared.inside) <= most) return low;
        bins = Bins::between(low, high);
    }
}

// Capacity of a bin for the sort.
constexpr u32 MOST_OF_BIN = 255;

// Bin sort: writes the keys of `found` candidates in
// order of score, then -1. Fails (returns false) if a
// bin has many entries because scores are nearly equal.
QG_DEVICE bool write_in_bins(const IndexerParams& p, SharedStorage& shared, u32 found, u32 query) {
    const u32 thread = thread_index();
    const auto number = [&](u32 i) { return i * QG_THREADS + thread < found ? ld_shared(&shared.gathered[i * QG_THREADS + thread]) : 0; };
    const Bins bins = bins_of_all<THREAD_GATHERED>(shared, [&](u32 i) { return place_of(number(i)); });
    // Highest scores first.
    const auto bin_of = [&](u64 number) { return BINS - 1 - bins.at(place_of(number)); };
    if (thread == 0) st_shared(&shared.inside, 0u);
    clear_bins(shared);
#pragma unroll
    for (u32 i = 0; i < THREAD_GATHERED; i++) {
        if (const u64 own = number(i); own != 0) reduce_add_shared(&shared.bins[bin_of(own)], 1);
    }
    cta_barrier();
    u32 sum = 0, most = 0, all;
#pragma unroll
    for (u32 i = 0; i < THREAD_BINS; i++) {
        const u32 count = ld_shared(&shared.bins[thread * THREAD_BINS + i]);
        sum += count;
        if (count > most) most = count;
    }
    if (most > MOST_OF_BIN) reduce_add_shared(&shared.inside, 1);
    u32 before = sum_before(shared, sum, all);
    if (ld_shared(&shared.inside) != 0) return false;
    // A bin's count becomes its begin offset;
    // the scatter advances it to its end offset.
#pragma unroll
    for (u32 i = 0; i < THREAD_BINS; i++) {
        u32* const bin = &shared.bins[thread * THREAD_BINS + i];
        const u32 count = ld_shared(bin);
        st_shared(bin, before);
        before += count;
    }
    u64 own[THREAD_GATHERED];
#pragma unroll
    for (u32 i = 0; i < THREAD_GATHERED; i++) own[i] = number(i);
    cta_barrier();
#pragma unroll
    for (u32 i = 0; i < THREAD_GATHERED; i++) {
        if (own[i] != 0) st_shared(&shared.gathered[atomic_add_shared(&shared.bins[bin_of(own[i])], 1)], own[i]);
    }
    cta_barrier();
    u8* const to = reinterpret_cast<u8*>(p.indices) + ((u64)p.first_query + query) * p.chosen * 4;
    for (u32 at = thread; at < found; at += QG_THREADS) {
        const u64 of_place = ld_shared(&shared.gathered[at]);
        const u32 bin = bin_of(of_place), begin = bin > 0 ? ld_shared(&shared.bins[bin - 1]) : 0, end = ld_shared(&shared.bins[bin]);
        if (begin >= p.chosen) break;
        u32 rank = begin;
        for (u32 other = begin; other < end; other++) rank += ld_shared(&shared.gathered[other]) > of_place;
        if (rank < p.chosen) st_global_u32(to + rank * 4, ~(u32)of_place);
    }
    for (u32 i = found + thread; i < p.chosen; i += QG_THREADS) st_global_u32(to + i * 4, ~0u);
    return true;
}

// Writes the top keys among `found` candidates.
QG_DEVICE void write_best(const IndexerParams& p, SharedStorage& shared, u32 found, u32 query) {
    if (!write_in_bins(p, shared, found, query)) write_chosen(p, shared, reduce(shared, found, p.chosen), query);
}
