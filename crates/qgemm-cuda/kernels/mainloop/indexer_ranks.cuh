// Sparse-attention indexer: top-k selection and sort
// by a CTA. A ranked value combines a score and the
// complement of its key into one unique number.
#pragma once
#include "atoms/bits.cuh"
#include "atoms/shared_atomic.cuh"
#include "atoms/sync.cuh"
#include "atoms/warp.cuh"
#include "mainloop/indexer_keys.cuh"
#include "sched/lane_sums.cuh"

constexpr u32 WARPS = QG_THREADS / 32;
// Radix-select histogram: 11 or 10 bits a pass.
constexpr u32 BINS = 2048, THREAD_BINS = BINS / QG_THREADS;
constexpr u32 DIGITS = 6;
// Candidate capacity. It exceeds any k, so that
// the bound of a sample need not be exact.
constexpr u32 MOST_GATHERED = 4096, THREAD_GATHERED = MOST_GATHERED / QG_THREADS;
// Largest k.
constexpr u32 MOST_CHOSEN = 2048;
static_assert(BINS % QG_THREADS == 0 && MOST_GATHERED % (4 * QG_THREADS) == 0, "threads have equally many");

struct SharedStorage {
    u64 gathered[MOST_GATHERED];
    u32 bins[BINS];
    u32 of_warps[WARPS];
    // Result of `find_bin`: the bin that reaches `wanted`,
    // the count above it, and the count inside it.
    u32 bin, above, inside;
    u32 count;
};
static_assert(sizeof(SharedStorage) == QG_SHARED_BYTES, "the host computes another size");

// Ranked value: ordered score in the high word, ~key
// in the low word. Larger comes first; 0 is no key.
QG_DEVICE u64 ranked(u32 bits, u32 key) {
    if (bits == ~0u) return 0;
    // Order-preserving bits. Both zeros
    // are equal; NaN is below all numbers.
    const u32 magnitude = bits & 0x7fffffffu;
    u32 score = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    if (magnitude == 0) score = 0x80000000u;
    if (magnitude > 0x7f800000u) score = 1;
    return (u64)score << 32 | ~key;
}

// Values that a thread processes at once.
constexpr u32 TOGETHER = 4;

// Ordered bits of −inf, which is above NaN.
constexpr u32 LEAST_NUMBER = 0x007fffffu;
// Score with given ordered bits.
QG_DEVICE float score_of_place(u32 place) {
    return bits_to_f32(place & 0x80000000u ? place & 0x7fffffffu : ~place);
}

// Candidates in shared memory.
struct Gathered {
    const u64* values;
    u32 count;

    template <class F>
    QG_DEVICE void each(const Gathered& all, F&& visit) {
        for (u32 base = 0; base < all.count; base += QG_THREADS * TOGETHER) {
            u64 values[TOGETHER];
#pragma unroll
            for (u32 i = 0; i < TOGETHER; i++) {
                const u32 at = base + i * QG_THREADS + thread_index();
                values[i] = at < all.count ? ld_shared(&all.values[at]) : 0;
            }
            visit(values);
        }
    }
};

// Values whose upper bits (after `shift`) are at least `bits`.
struct Bound {
    u64 bits;
    u32 shift;

    QG_DEVICE bool holds(const Bound& bound, u64 value) {
        return value != 0 && value >> bound.shift >= bound.bits;
    }
};

// Counts in a histogram. Lanes that share the leader's bin are
// counted with one atomic, because scores are often equal.
QG_DEVICE void count(u32* bins, bool counts, u32 bin) {
    const u32 lane = thread_index() % 32, all = ballot(counts);
    if (all == 0) return;
    const u32 leader = popc((all & (0u - all)) - 1);
    const u32 of_leader = shfl_idx_u32(bin, leader);
    const bool is_same = counts && bin == of_leader;
    const u32 same = ballot(is_same);
    if (lane == leader)
        reduce_add_shared(&bins[bin], popc(same));
    else if (counts && !is_same)
        reduce_add_shared(&bins[bin], 1);
}

// Exclusive prefix sum over threads; `all`
// receives the total. Call after a barrier.
QG_DEVICE u32 sum_before(SharedStorage& shared, u32 own, u32& all) {
    const u32 lane = thread_index() % 32, warp = thread_index() / 32;
    u32 upto = sum_up_to_lane(own);
    if (lane == 31) st_shared(&shared.of_warps[warp], upto);
    cta_barrier();
    // Each warp scans the warp sums, one per lane.
    const u32 upto_warp = sum_up_to_lane<WARPS>(lane < WARPS ? ld_shared(&shared.of_warps[lane]) : 0u);
    all = shfl_idx_u32(upto_warp, WARPS - 1);
    const u32 before = shfl_idx_u32(upto_warp, warp - 1);
    if (warp > 0) upto += before;
    return upto - own;
}

// Finds the bin, from the highest down, where the count reaches
// `wanted`. Returns the total; if it is smaller, no bin is found.
QG_DEVICE u32 find_bin(SharedStorage& shared, u32 wanted) {
    const u32 thread = thread_index();
    cta_barrier();
    // Thread 0 has the highest bins.
    const u32 top = BINS - 1 - thread * THREAD_BINS;
    u32 own[THREAD_BINS], sum = 0;
#pragma unroll
    for (u32 i = 0; i < THREAD_BINS; i++) sum += own[i] = ld_shared(&shared.bins[top - i]);
    u32 all;
    u32 above = sum_before(shared, sum, all);
    if (above < wanted && above + sum >= wanted) {
#pragma unroll
        for (u32 i = 0; i < THREAD_BINS; i++) {
            if (above < wanted && above + own[i] >= wanted) {
                st_shared(&shared.bin, top - i);
                st_shared(&shared.above, above);
                st_shared(&shared.inside, own[i]);
            }
            above += own[i];
        }
    }
    cta_barrier();
    return all;
}

// Radix select: a bound that at least `wanted`
// values reach, and at most `most` (≥ `wanted`).
// Returns bound 1 if no more than `wanted` exist.
template <class Source>
QG_DEVICE Bound find_bound(const Source& source, SharedStorage& shared, u32 wanted, u32 most) {
    Bound bound = {0, 64};
    u32 above = 0;
    for (u32 digit = 0, shift = 64; digit < DIGITS; digit++) {
        const u32 width = digit % 3 == 2 ? 10 : 11;
        shift -= width;
        cta_barrier();
        for (u32 i = thread_index(); i < BINS; i += QG_THREADS) st_shared(&shared.bins[i], 0u);
        cta_barrier();
        Source::each(source, [&](const u64 (&values)[TOGETHER]) {
#pragma unroll
            for (u32 i = 0; i < TOGETHER; i++) {
                // Two shifts: a shift by 64 is undefined.
                const bool counts = values[i] != 0 && values[i] >> shift >> width == bound.bits;
                count(shared.bins, counts, (u32)(values[i] >> shift) & ((1u << width) - 1));
            }
        });
        const u32 all = find_bin(shared, wanted - above);
        if (digit == 0 && all <= wanted) return {1, 0};
        bound = {bound.bits << width | ld_shared(&shared.bin), shift};
        above += ld_shared(&shared.above);
        if (above + ld_shared(&shared.inside) <= most) break;
    }
    return bound;
}

// Appends values that reach the bound to
// `gathered`, up to its capacity. Warp-collective.
QG_DEVICE void append(SharedStorage& shared, const Bound& bound, const u64 (&values)[TOGETHER]) {
    const u32 lane = thread_index() % 32;
    u32 wanted[TOGETHER], all = 0;
#pragma unroll
    for (u32 i = 0; i < TOGETHER; i++) {
        wanted[i] = ballot(Bound::holds(bound, values[i]));
        all += popc(wanted[i]);
    }
    if (all == 0) return;
    u32 first = 0;
    if (lane == 0) first = atomic_add_shared(&shared.count, all);
    u32 to = shfl_idx_u32(first, 0);
#pragma unroll
    for (u32 i = 0; i < TOGETHER; i++) {
        const u32 at = to + popc(wanted[i] & ((1u << lane) - 1));
        if (Bound::holds(bound, values[i]) && at < MOST_GATHERED) st_shared(&shared.gathered[at], values[i]);
        to += popc(wanted[i]);
    }
}

QG_DEVICE void clear_count(SharedStorage& shared) {
    cta_barrier();
    if (thread_index() == 0) st_shared(&shared.count, 0u);
    cta_barrier();
}

// Gathers all values that reach the bound. Returns
// their number, which may exceed the capacity.
template <class Source>
QG_DEVICE u32 gather(const Source& source, SharedStorage& shared, const Bound& bound) {
    clear_count(shared);
    Source::each(source, [&](const u64 (&values)[TOGETHER]) { append(shared, bound, values); });
    cta_barrier();
    return ld_shared(&shared.count);
}

// Keeps the `wanted` largest of `found`
// values. Returns how many remain.
QG_DEVICE u32 reduce(SharedStorage& shared, u32 found, u32 wanted) {
    if (found <= wanted) return found;
    const Bound bound = find_bound(Gathered{shared.gathered, found}, shared, wanted, wanted);
    u64 own[THREAD_GATHERED / TOGETHER][TOGETHER];
#pragma unroll
    for (u32 i = 0; i < THREAD_GATHERED; i++) {
        const u32 at = i * QG_THREADS + thread_index();
        own[i / TOGETHER][i % TOGETHER] = at < found ? ld_shared(&shared.gathered[at]) : 0;
    }
    clear_count(shared);
#pragma unroll
    for (u32 i = 0; i < THREAD_GATHERED / TOGETHER; i++) append(shared, bound, own[i]);
    cta_barrier();
    return wanted;
}

// Adjacent values that a thread sorts.
constexpr u32 OWN = MOST_CHOSEN / QG_THREADS;
static_assert(OWN == 4 && 2 * MOST_CHOSEN <= MOST_GATHERED, "threads sort four each, and exchange them through two places in turn");

// Compare-exchange: the larger or the smaller value of a pair.
QG_DEVICE u64 kept(u64 own, u64 other, bool keeps_larger) {
    return (own < other) == keeps_larger ? other : own;
}

// Bitonic sort, descending, over the next power of two. Values are
// in registers; exchanges between warps go through shared memory.
QG_DEVICE void sort(SharedStorage& shared, u32 count) {
    const u32 thread = thread_index(), first = thread * OWN;
    u32 size = 2;
    while (size < count) size *= 2;
    u64 own[OWN];
#pragma unroll
    for (u32 i = 0; i < OWN; i++) own[i] = first + i < count ? ld_shared(&shared.gathered[first + i]) : 0;
    cta_barrier();
    u32 place = 0;
#pragma unroll 1
    for (u32 run = 2; run <= size; run *= 2) {
#pragma unroll 1
        for (u32 distance = run / 2; distance >= OWN; distance /= 2) {
            // Descending runs keep the larger value at the lower position.
            const bool keeps_larger = ((first & run) == 0) == ((first & distance) == 0);
            u64 other[OWN];
            if (distance >= 32 * OWN) {
                u64* const numbers = shared.gathered + place;
                place ^= MOST_CHOSEN;
#pragma unroll
                for (u32 i = 0; i < OWN; i++) st_shared(&numbers[first + i], own[i]);
                cta_barrier();
#pragma unroll
                for (u32 i = 0; i < OWN; i++) other[i] = ld_shared(&numbers[(first ^ distance) + i]);
            } else {
#pragma unroll
                for (u32 i = 0; i < OWN; i++) {
                    const u32 low = shfl_xor_u32((u32)own[i], distance / OWN), high = shfl_xor_u32((u32)(own[i] >> 32), distance / OWN);
                    other[i] = (u64)high << 32 | low;
                }
            }
#pragma unroll
            for (u32 i = 0; i < OWN; i++) own[i] = kept(own[i], other[i], keeps_larger);
        }
        // Exchanges within a thread.
#pragma unroll
        for (u32 distance = OWN / 2; distance > 0; distance /= 2) {
            if (distance >= run) continue;
#pragma unroll
            for (u32 i = 0; i < OWN; i++) {
                if (i & distance) continue;
                const bool keeps_larger = ((first + i) & run) == 0;
                const u64 low = own[i], high = own[i + distance];
                own[i] = kept(low, high, keeps_larger);
                own[i + distance] = kept(high, low, !keeps_larger);
            }
        }
    }
    cta_barrier();
#pragma unroll
    for (u32 i = 0; i < OWN; i++) st_shared(&shared.gathered[first + i], own[i]);
    cta_barrier();
}

// Sorts the candidates and writes the keys of a query,
// then -1. `shared` already holds at most k candidates.
QG_DEVICE void write_chosen(const IndexerParams& p, SharedStorage& shared, u32 found, u32 query) {
    sort(shared, found);
    u8* to = reinterpret_cast<u8*>(p.indices) + ((u64)p.first_query + query) * p.chosen * 4;
    for (u32 i = thread_index(); i < p.chosen; i += QG_THREADS)
        st_global_u32(to + i * 4, i < found ? ~(u32)ld_shared(&shared.gathered[i]) : ~0u);
}
