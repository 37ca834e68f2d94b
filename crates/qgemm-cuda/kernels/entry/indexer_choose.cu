// The keys with the highest scores of a query, in the order of scores: a CTA a query. Histograms of the bits of scores, the upper ones
// first, find a bound that about as many scores reach as are wanted; those are sorted in shared memory.
#include "atoms/bits.cuh"
#include "atoms/shared_atomic.cuh"
#include "atoms/sync.cuh"
#include "atoms/warp.cuh"
#include "mainloop/indexer_keys.cuh"

constexpr u32 WARPS = QG_THREADS / 32;
// Bins of a histogram, and the bits of a score that each of three finds: 11, 11 and 10.
constexpr u32 BINS = 2048;
constexpr u32 THREAD_BINS = BINS / QG_THREADS;
// Keys that are sorted together: twice as many as are chosen at most, so that the bound need not be exact.
constexpr u32 MOST_SORTED = 4096;
static_assert(BINS % QG_THREADS == 0, "threads have equally many bins");

struct SharedStorage {
    // Score above, complement of the key below: those that come first are the largest.
    u64 sorted[MOST_SORTED];
    u32 bins[BINS];
    u32 of_warps[WARPS];
    // The bin where as many as are wanted are reached, how many are above it, and how many in it.
    u32 bin, above, inside;
    u32 gathered;
};
static_assert(sizeof(SharedStorage) == QG_SHARED_BYTES, "the host computes another size");

// No key: below all scores.
constexpr u32 NOTHING = 0;

// Bits in the order of scores, the same for both zeros; NaN is below all numbers.
QG_DEVICE u32 ordered(u32 bits) {
    const u32 magnitude = bits & 0x7fffffffu;
    if (bits == ~0u) return NOTHING;
    if (magnitude > 0x7f800000u) return 1;
    if (magnitude == 0) return 0x80000000u;
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// The scores of a query: those between `first` and `end`.
struct Scores {
    const u8* row;
    KeyRange seen;

    // Calls `visit` for four neighbouring keys at a time, by all threads of the CTA equally often: with key and score, or nothing.
    template <class F>
    QG_DEVICE void visit(const Scores& scores, F&& visit) {
        const u32 first = scores.seen.first & ~3u;
        for (u32 base = first; base < scores.seen.end; base += QG_THREADS * 4) {
            const u32 key = base + thread_index() * 4;
            u32x4 v = {~0u, ~0u, ~0u, ~0u};
            if (key < scores.seen.end) v = ld_global_v4(scores.row + (u64)key * 4);
            const u32 bits[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
            for (u32 i = 0; i < 4; i++) {
                const bool is_seen = key + i >= scores.seen.first && key + i < scores.seen.end;
                visit(key + i, is_seen ? ordered(bits[i]) : NOTHING);
            }
        }
    }
};

// Counts in a bin. Lanes that have the same one as the first lane that counts are counted together: scores are often alike.
QG_DEVICE void count(u32* bins, bool counts, u32 bin) {
    const u32 lane = thread_index() % 32, all = ballot(counts);
    if (all == 0) return;
    const u32 leader = popc((all & (0u - all)) - 1);
    const u32 of_leader = shfl_idx_u32(bin, leader);
    const bool is_same = counts && bin == of_leader;
    const u32 same = ballot(is_same);
    if (lane == leader)
        atomic_add_shared(&bins[bin], popc(same));
    else if (counts && !is_same)
        atomic_add_shared(&bins[bin], 1);
}

// Finds the bin, from the highest on, where `wanted` are reached; all of them must be counted, and at least as many.
QG_DEVICE void find_bin(SharedStorage& shared, u32 wanted) {
    const u32 thread = thread_index(), lane = thread % 32, warp = thread / 32;
    cta_barrier();
    // Thread 0 has the highest bins.
    const u32 top = BINS - 1 - thread * THREAD_BINS;
    u32 own[THREAD_BINS], sum = 0;
#pragma unroll
    for (u32 i = 0; i < THREAD_BINS; i++) sum += own[i] = ld_shared(&shared.bins[top - i]);
    u32 upto = sum;
#pragma unroll
    for (u32 step = 1; step < 32; step *= 2) {
        const u32 before = shfl_idx_u32(upto, lane - step);
        if (lane >= step) upto += before;
    }
    if (lane == 31) st_shared(&shared.of_warps[warp], upto);
    cta_barrier();
    for (u32 i = 0; i < warp; i++) upto += ld_shared(&shared.of_warps[i]);
    u32 above = upto - sum;
    if (above < wanted && upto >= wanted) {
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
}

QG_DEVICE void clear_bins(SharedStorage& shared) {
    cta_barrier();
    for (u32 i = thread_index(); i < BINS; i += QG_THREADS) st_shared(&shared.bins[i], 0u);
    cta_barrier();
}

// A bound: keys whose scores have more than `bits`, shifted by `shift`, are chosen, and of those that have as much, the first.
struct Bound {
    u32 bits, shift;
    // Keys above it, and at it.
    u32 above, at;
};

// Finds a bound that `wanted` keys reach, so close that they can be sorted together, or else exact.
QG_DEVICE Bound find_bound(const Scores& scores, SharedStorage& shared, u32 wanted) {
    constexpr u32 SHIFTS[3] = {21, 10, 0}, MASKS[3] = {2047, 2047, 1023};
    Bound bound = {0, 32, 0, 0};
#pragma unroll
    for (u32 pass = 0; pass < 3; pass++) {
        clear_bins(shared);
        const u32 shift = SHIFTS[pass], mask = MASKS[pass];
        Scores::visit(scores, [&](u32, u32 score) {
            const bool counts = score != NOTHING && (pass == 0 || score >> bound.shift == bound.bits);
            count(shared.bins, counts, score >> shift & mask);
        });
        if (pass == 0) {
            // All of them are wanted, if they are fewer.
            cta_barrier();
            u32 all = 0;
            for (u32 i = thread_index(); i < BINS; i += QG_THREADS) all += ld_shared(&shared.bins[i]);
#pragma unroll
            for (u32 step = 16; step > 0; step /= 2) all += shfl_xor_u32(all, step);
            if (thread_index() % 32 == 0) st_shared(&shared.of_warps[thread_index() / 32], all);
            cta_barrier();
            all = 0;
#pragma unroll
            for (u32 i = 0; i < WARPS; i++) all += ld_shared(&shared.of_warps[i]);
            if (all <= wanted) return {0, 0, all, 0};
        }
        find_bin(shared, wanted - bound.above);
        bound.bits = pass == 0 ? ld_shared(&shared.bin) : bound.bits << (bound.shift - shift) | ld_shared(&shared.bin);
        bound.shift = shift;
        bound.above += ld_shared(&shared.above);
        bound.at = ld_shared(&shared.inside);
        if (bound.above + bound.at <= MOST_SORTED) break;
    }
    return bound;
}

QG_DEVICE u64 sort_key(u32 score, u32 key) {
    return (u64)score << 32 | ~key;
}

// Gathers the keys that are sorted. Returns how many.
QG_DEVICE u32 gather(const Scores& scores, SharedStorage& shared, const Bound& bound, u32 wanted) {
    const bool fits = bound.above + bound.at <= MOST_SORTED;
    cta_barrier();
    if (thread_index() == 0) st_shared(&shared.gathered, 0u);
    cta_barrier();
    Scores::visit(scores, [&](u32 key, u32 score) {
        const u32 upper = score >> bound.shift;
        if (score != NOTHING && (upper > bound.bits || (fits && upper == bound.bits)))
            st_shared(&shared.sorted[atomic_add_shared(&shared.gathered, 1)], sort_key(score, key));
    });
    cta_barrier();
    if (fits) return bound.above + bound.at;
    // More have the score of the bound than can be sorted: the first of them, found in the order of keys.
    u32 found = bound.above;
    const u32 lane = thread_index() % 32, warp = thread_index() / 32;
    for (u32 base = scores.seen.first; base < scores.seen.end && found < wanted; base += QG_THREADS) {
        const u32 key = base + thread_index();
        const u32 score = key < scores.seen.end ? ordered(ld_global_u32(scores.row + (u64)key * 4)) : NOTHING;
        const bool is_at = score != NOTHING && score == bound.bits;
        const u32 all = ballot(is_at);
        if (lane == 0) st_shared(&shared.of_warps[warp], popc(all));
        cta_barrier();
        u32 before = found + popc(all & ((1u << lane) - 1)), total = found;
        for (u32 i = 0; i < WARPS; i++) {
            const u32 of_warp = ld_shared(&shared.of_warps[i]);
            if (i < warp) before += of_warp;
            total += of_warp;
        }
        if (is_at && before < wanted) st_shared(&shared.sorted[before], sort_key(score, key));
        found = total;
        cta_barrier();
    }
    return least(found, wanted);
}

// Sorts, the largest first: a bitonic network over the next power of two.
QG_DEVICE void sort(SharedStorage& shared, u32 count) {
    u32 size = 2;
    while (size < count) size *= 2;
    for (u32 i = count + thread_index(); i < size; i += QG_THREADS) st_shared(&shared.sorted[i], (u64)0);
    cta_barrier();
    for (u32 run = 2; run <= size; run *= 2) {
        for (u32 distance = run / 2; distance > 0; distance /= 2) {
            for (u32 pair = thread_index(); pair < size / 2; pair += QG_THREADS) {
                const u32 low = pair / distance * distance * 2 + pair % distance, high = low + distance;
                const u64 a = ld_shared(&shared.sorted[low]), b = ld_shared(&shared.sorted[high]);
                const bool falls = (low & run) == 0;
                if ((a < b) == falls) {
                    st_shared(&shared.sorted[low], b);
                    st_shared(&shared.sorted[high], a);
                }
            }
            cta_barrier();
        }
    }
}

extern "C" __global__ void __launch_bounds__(QG_THREADS) qg_indexer_choose(const __grid_constant__ IndexerParams p) {
    SharedStorage& shared = *reinterpret_cast<SharedStorage*>(dynamic_shared());
    const u32 query = cta_index().x, sequence = query / p.sequence_queries;
    griddepcontrol_launch_dependents();
    griddepcontrol_wait();
    const Scores scores = {reinterpret_cast<const u8*>(p.scores) + query * p.scores_row * 4,
                           keys_seen(p, sequence, query % p.sequence_queries)};
    const Bound bound = find_bound(scores, shared, p.chosen);
    const u32 found = gather(scores, shared, bound, p.chosen);
    sort(shared, found);
    u8* to = reinterpret_cast<u8*>(p.indices) + ((u64)p.first_query + query) * p.chosen * 4;
    for (u32 i = thread_index(); i < p.chosen; i += QG_THREADS)
        st_global_u32(to + i * 4, i < found ? ~(u32)ld_shared(&shared.sorted[i]) : ~0u);
}
