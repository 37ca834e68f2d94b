// The keys with the highest scores of a query, in the order of scores: a CTA a query. A score and the complement of its key are one number,
// of which no two are alike. From a sample of them comes a bound that somewhat more reach than are wanted; those are gathered in shared
// memory, reduced to as many as are wanted, and sorted. Where the sample misleads, the bound is found from all.
#include "atoms/bits.cuh"
#include "atoms/shared_atomic.cuh"
#include "atoms/sync.cuh"
#include "atoms/warp.cuh"
#include "mainloop/indexer_keys.cuh"

constexpr u32 WARPS = QG_THREADS / 32;
// Turing's SMs have 1024 threads; for consumer Blackwell the compiler would spill.
constexpr u32 CTAS = QG_VARIANT == 75 || QG_VARIANT == 120 ? 2 : 3;
// Bins of a histogram, by which a bound is found 11 or 10 bits at a time.
constexpr u32 BINS = 2048, THREAD_BINS = BINS / QG_THREADS;
constexpr u32 DIGITS = 6;
// Keys that are gathered at most: more than are ever wanted, so that a sample's bound need not be exact.
constexpr u32 MOST_GATHERED = 4096, THREAD_GATHERED = MOST_GATHERED / QG_THREADS;
// Keys that are chosen at most.
constexpr u32 MOST_CHOSEN = 2048;
// Keys of a sample.
constexpr u32 SAMPLED = 4096;
static_assert(BINS % QG_THREADS == 0 && MOST_GATHERED % (4 * QG_THREADS) == 0 && SAMPLED % QG_THREADS == 0, "threads have equally many");
static_assert(SAMPLED <= MOST_GATHERED, "a sample takes the place of what is gathered");

struct SharedStorage {
    u64 gathered[MOST_GATHERED];
    u32 bins[BINS];
    u32 of_warps[WARPS];
    // The bin where as many as are wanted are reached, how many are above it, and how many in it.
    u32 bin, above, inside;
    u32 count;
};
static_assert(sizeof(SharedStorage) == QG_SHARED_BYTES, "the host computes another size");

// Score above, complement of the key below: those that come first are the largest. 0 where there is none.
QG_DEVICE u64 ranked(u32 bits, u32 key) {
    if (bits == ~0u) return 0;
    // Bits in the order of scores, the same for both zeros; NaN is below all numbers.
    const u32 magnitude = bits & 0x7fffffffu;
    u32 score = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    if (magnitude == 0) score = 0x80000000u;
    if (magnitude > 0x7f800000u) score = 1;
    return (u64)score << 32 | ~key;
}

// Numbers that a thread looks at together.
constexpr u32 TOGETHER = 4;

// All scores of a query, of neighbouring keys.
struct Scores {
    const u8* row;
    KeyRange seen;

    // Calls `visit` by all threads of the CTA equally often.
    template <class F>
    QG_DEVICE void each(const Scores& scores, F&& visit) {
        const u32 end = scores.seen.end;
        const auto load = [&](u32 key) {
            u32x4 v = {~0u, ~0u, ~0u, ~0u};
            if (key < end) v = ld_global_v4(scores.row + (u64)key * 4);
            return v;
        };
        const u32 own = thread_index() * TOGETHER;
        u32x4 next = load((scores.seen.first & ~3u) + own);
        for (u32 base = scores.seen.first & ~3u; base < end; base += QG_THREADS * TOGETHER) {
            const u32x4 v = next;
            // In flight while these are looked at.
            if (base + QG_THREADS * TOGETHER < end) next = load(base + QG_THREADS * TOGETHER + own);
            const u32 bits[TOGETHER] = {v.x, v.y, v.z, v.w};
            u64 values[TOGETHER];
#pragma unroll
            for (u32 i = 0; i < TOGETHER; i++) {
                const u32 key = base + own + i;
                values[i] = key >= scores.seen.first && key < end ? ranked(bits[i], key) : 0;
            }
            visit(values);
        }
    }
};

// What was gathered.
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

// Numbers from `bits`, shifted by `shift`, on.
struct Bound {
    u64 bits;
    u32 shift;

    QG_DEVICE bool holds(const Bound& bound, u64 value) {
        return value != 0 && value >> bound.shift >= bound.bits;
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
        reduce_add_shared(&bins[bin], popc(same));
    else if (counts && !is_same)
        reduce_add_shared(&bins[bin], 1);
}

// Finds the bin, from the highest on, where `wanted` are reached. Returns how many are counted; where those are fewer, there is none.
QG_DEVICE u32 find_bin(SharedStorage& shared, u32 wanted) {
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
    u32 all = 0;
#pragma unroll
    for (u32 i = 0; i < WARPS; i++) {
        const u32 of_warp = ld_shared(&shared.of_warps[i]);
        if (i < warp) upto += of_warp;
        all += of_warp;
    }
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
    return all;
}

// The bound that at least `wanted` reach, and at most `most`; 1 where there are no more than are wanted. `most` is at least `wanted`.
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
                // Shifted twice, because not all of a number may be shifted at once.
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

// Appends those that reach the bound to what is gathered, as far as there is room. For whole warps.
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
        if ((wanted[i] >> lane & 1u) && at < MOST_GATHERED) st_shared(&shared.gathered[at], values[i]);
        to += popc(wanted[i]);
    }
}

QG_DEVICE void clear_count(SharedStorage& shared) {
    cta_barrier();
    if (thread_index() == 0) st_shared(&shared.count, 0u);
    cta_barrier();
}

// Gathers what reaches the bound. Returns how many do, of which as many as there is room for are there.
template <class Source>
QG_DEVICE u32 gather(const Source& source, SharedStorage& shared, const Bound& bound) {
    clear_count(shared);
    Source::each(source, [&](const u64 (&values)[TOGETHER]) { append(shared, bound, values); });
    cta_barrier();
    return ld_shared(&shared.count);
}

// The lowest place of a number in the order of scores: that of minus infinity, above NaN.
constexpr u32 LEAST_NUMBER = 0x007fffffu;
// Scores that a thread compares before a warp appends those that reach the bound.
constexpr u32 COMPARED = 2 * TOGETHER;

// The same of scores, few of which reach the bound: where that depends on scores alone, they are compared as they are stored, and become
// numbers in the order of scores when they have been gathered.
QG_DEVICE u32 gather_scores(const Scores& scores, SharedStorage& shared, const Bound& bound) {
    const u32 place = bound.shift >= 32 && bound.shift < 64 ? (u32)(bound.bits << (bound.shift - 32)) : 0;
    if (place < LEAST_NUMBER) return gather(scores, shared, bound);
    const float least_score = bits_to_f32(place & 0x80000000u ? place & 0x7fffffffu : ~place);
    clear_count(shared);
    const u32 thread = thread_index(), lane = thread % 32, first = scores.seen.first, end = scores.seen.end;
    const auto load = [&](u32 key) {
        u32x4 v = {~0u, ~0u, ~0u, ~0u};
        if (key < end) v = ld_global_v4(scores.row + (u64)key * 4);
        return v;
    };
    constexpr u32 STRIDE = QG_THREADS * TOGETHER;
    const u32 begin = first & ~3u;
    u32x4 next[2] = {load(begin + thread * TOGETHER), load(begin + thread * TOGETHER + STRIDE)};
    for (u32 base = begin; base < end; base += 2 * STRIDE) {
        const u32 key = base + thread * TOGETHER;
        u32 bits[COMPARED] = {next[0].x, next[0].y, next[0].z, next[0].w, next[1].x, next[1].y, next[1].z, next[1].w};
        // In flight while these are looked at.
#pragma unroll
        for (u32 i = 0; i < 2; i++) next[i] = load(key + (2 + i) * STRIDE);
        // Keys of the first and the last four may not be seen. NaN reaches no bound.
        if (base < first || base + 2 * STRIDE > end) {
#pragma unroll
            for (u32 i = 0; i < COMPARED; i++) {
                const u32 own_key = key + i / TOGETHER * STRIDE + i % TOGETHER;
                if (own_key < first || own_key >= end) bits[i] = ~0u;
            }
        }
        u32 own = 0;
#pragma unroll
        for (u32 i = 0; i < COMPARED; i++) own += bits_to_f32(bits[i]) >= least_score;
        // A lane's place among those of its warp, from the digits of how many each lane has.
        const u32 below = (1u << lane) - 1;
        u32 all = 0, before = 0;
#pragma unroll
        for (u32 digit = 1; digit <= COMPARED; digit *= 2) {
            const u32 lanes = ballot(own & digit);
            all += popc(lanes) * digit;
            before += popc(lanes & below) * digit;
        }
        if (all == 0) continue;
        u32 to = 0;
        if (lane == 0) to = atomic_add_shared(&shared.count, all);
        to = shfl_idx_u32(to, 0);
        if (to + all > MOST_GATHERED) continue;
        to += before;
#pragma unroll
        for (u32 i = 0; i < COMPARED; i++) {
            if (!(bits_to_f32(bits[i]) >= least_score)) continue;
            const u32 own_key = key + i / TOGETHER * STRIDE + i % TOGETHER;
            st_shared(&shared.gathered[to++], (u64)own_key << 32 | bits[i]);
        }
    }
    cta_barrier();
    const u32 found = ld_shared(&shared.count);
    if (found > MOST_GATHERED) return found;
    for (u32 at = thread; at < found; at += QG_THREADS) {
        const u64 value = ld_shared(&shared.gathered[at]);
        st_shared(&shared.gathered[at], ranked((u32)value, (u32)(value >> 32)));
    }
    cta_barrier();
    return found;
}

// Every so many-th of all scores, to the place of what is gathered later: each digit of a bound looks at all of them.
QG_DEVICE void take_sample(const Scores& scores, SharedStorage& shared) {
    const u32 step = (scores.seen.end - scores.seen.first) / SAMPLED;
    constexpr u32 OWN = SAMPLED / QG_THREADS;
    const auto key_of = [&](u32 i) { return scores.seen.first + (i * QG_THREADS + thread_index()) * step; };
    u32 bits[OWN];
#pragma unroll
    for (u32 i = 0; i < OWN; i++) bits[i] = ld_global_u32(scores.row + (u64)key_of(i) * 4);
#pragma unroll
    for (u32 i = 0; i < OWN; i++) st_shared(&shared.gathered[i * QG_THREADS + thread_index()], ranked(bits[i], key_of(i)));
}

// Gathers at least `wanted`, if there are as many, and no more than there is room for.
QG_DEVICE u32 gather_candidates(const Scores& scores, SharedStorage& shared, u32 wanted) {
    const u32 keys = scores.seen.end - scores.seen.first;
    if (keys <= MOST_GATHERED) return gather(scores, shared, {1, 0});
    // In the middle between too few and too many.
    const u32 aim = (wanted + MOST_GATHERED) / 2;
    const u32 of_sample = (u32)((u64)aim * SAMPLED / keys) + 1;
    take_sample(scores, shared);
    u32 found = gather_scores(scores, shared, find_bound(Gathered{shared.gathered, SAMPLED}, shared, of_sample, of_sample));
    if (found < wanted || found > MOST_GATHERED)
        found = gather(scores, shared, find_bound(scores, shared, wanted, MOST_GATHERED));
    return found;
}

// Leaves the `wanted` largest of `found`. Returns how many there are.
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

// Numbers that a thread sorts, neighbours.
constexpr u32 OWN = MOST_CHOSEN / QG_THREADS;
static_assert(OWN == 4 && 2 * MOST_CHOSEN <= MOST_GATHERED, "threads sort four each, and exchange them through two places in turn");

// Of a pair, the number that has the place of the larger or the smaller one.
QG_DEVICE u64 kept(u64 own, u64 other, bool keeps_larger) {
    return (own < other) == keeps_larger ? other : own;
}

// Sorts, the largest first: a bitonic network over the next power of two. Numbers are in registers; those of other warps pass through shared
// memory.
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
            // Runs that fall keep the larger number at the lower place.
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
        // Among a thread's own.
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

// Three CTAs of an SM leave fewer registers than the compiler would take by itself.
extern "C" __global__ void __launch_bounds__(QG_THREADS, CTAS) qg_indexer_choose(const __grid_constant__ IndexerParams p) {
    SharedStorage& shared = *reinterpret_cast<SharedStorage*>(dynamic_shared());
    const u32 query = cta_index().x, sequence = query / p.sequence_queries;
    griddepcontrol_launch_dependents();
    griddepcontrol_wait();
    const Scores scores = {reinterpret_cast<const u8*>(p.scores) + query * p.scores_row * 4,
                           keys_seen(p, sequence, query % p.sequence_queries)};
    const u32 found = reduce(shared, gather_candidates(scores, shared, p.chosen), p.chosen);
    sort(shared, found);
    u8* to = reinterpret_cast<u8*>(p.indices) + ((u64)p.first_query + query) * p.chosen * 4;
    for (u32 i = thread_index(); i < p.chosen; i += QG_THREADS)
        st_global_u32(to + i * 4, i < found ? ~(u32)ld_shared(&shared.gathered[i]) : ~0u);
}
