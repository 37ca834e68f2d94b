// Sparse-attention indexer: top-k keys of a query, sorted by
// score; one CTA per query. A sample gives a bound that
// slightly more keys reach than are wanted. These keys are
// gathered in shared memory, reduced to k and sorted. If the
// sample misleads, the bound is computed from all scores.
// Skips queries whose keys were gathered during scoring.
#include "mainloop/indexer_bins.cuh"
#include "mainloop/indexer_records.cuh"

// Sampled keys.
constexpr u32 SAMPLED = 4096;
static_assert(SAMPLED % QG_THREADS == 0 && SAMPLED <= MOST_GATHERED, "a sample takes the place of what is gathered");

// All scores of a query, as a contiguous range.
struct Scores {
    const u8* row;
    KeyRange visible;

    // Every thread of the CTA calls `visit` equally often.
    template <class F>
    QG_DEVICE void each(const Scores& scores, F&& visit) {
        const u32 end = scores.visible.end;
        const auto load = [&](u32 key) {
            u32x4 v = {~0u, ~0u, ~0u, ~0u};
            if (key < end) v = ld_global_v4(scores.row + (u64)key * 4);
            return v;
        };
        const u32 own = thread_index() * TOGETHER;
        u32x4 next = load((scores.visible.first & ~3u) + own);
        for (u32 base = scores.visible.first & ~3u; base < end; base += QG_THREADS * TOGETHER) {
            const u32x4 v = next;
            // Prefetch of the next scores.
            if (base + QG_THREADS * TOGETHER < end) next = load(base + QG_THREADS * TOGETHER + own);
            const u32 bits[TOGETHER] = {v.x, v.y, v.z, v.w};
            u64 values[TOGETHER];
#pragma unroll
            for (u32 i = 0; i < TOGETHER; i++) {
                const u32 key = base + own + i;
                values[i] = key >= scores.visible.first && key < end ? ranked(bits[i], key) : 0;
            }
            visit(values);
        }
    }
};

// Scores that a thread compares before its warp appends candidates.
constexpr u32 COMPARED = 2 * TOGETHER;

// Gathers scores that reach the bound; few do. If
// the bound depends on scores alone, it compares
// raw scores and ranks only the gathered ones.
QG_DEVICE u32 gather_scores(const Scores& scores, SharedStorage& shared, const Bound& bound) {
    const u32 place = bound.shift >= 32 && bound.shift < 64 ? (u32)(bound.bits << (bound.shift - 32)) : 0;
    if (place < LEAST_NUMBER) return gather(scores, shared, bound);
    const float least_score = score_of_place(place);
    clear_count(shared);
    const u32 thread = thread_index(), lane = thread % 32, first = scores.visible.first, end = scores.visible.end;
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
        // Prefetch of the next scores.
#pragma unroll
        for (u32 i = 0; i < 2; i++) next[i] = load(key + (2 + i) * STRIDE);
        // The first and last vectors may contain
        // masked keys. NaN reaches no bound.
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
        // Prefix sum over lanes by ballots of
        // the binary digits of their counts.
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

// Stores every step-th score in `gathered`:
// each digit of a bound reads the whole sample.
QG_DEVICE void take_sample(const Scores& scores, SharedStorage& shared) {
    const u32 step = (scores.visible.end - scores.visible.first) / SAMPLED;
    constexpr u32 OWN = SAMPLED / QG_THREADS;
    const auto key_of = [&](u32 i) { return scores.visible.first + (i * QG_THREADS + thread_index()) * step; };
    u32 bits[OWN];
#pragma unroll
    for (u32 i = 0; i < OWN; i++) bits[i] = ld_global_u32(scores.row + (u64)key_of(i) * 4);
#pragma unroll
    for (u32 i = 0; i < OWN; i++) st_shared(&shared.gathered[i * QG_THREADS + thread_index()], ranked(bits[i], key_of(i)));
}

// Gathers at least `wanted` keys, if so
// many exist, and at most MOST_GATHERED.
QG_DEVICE u32 gather_candidates(const Scores& scores, SharedStorage& shared, u32 wanted) {
    const u32 keys = scores.visible.end - scores.visible.first;
    if (keys <= MOST_GATHERED) return gather(scores, shared, {1, 0});
    // Aim at the middle between too few and too many.
    const u32 aim = (wanted + MOST_GATHERED) / 2;
    const u32 of_sample = (u32)((u64)aim * SAMPLED / keys) + 1;
    take_sample(scores, shared);
    u32 found = gather_scores(scores, shared, find_bound(Gathered{shared.gathered, SAMPLED}, shared, of_sample, of_sample));
    if (found < wanted || found > MOST_GATHERED)
        found = gather(scores, shared, find_bound(scores, shared, wanted, MOST_GATHERED));
    return found;
}

// Two CTAs per SM: with three, fewer registers
// would slow down the few queries of decoding.
extern "C" __global__ void __launch_bounds__(QG_THREADS, 2) qg_indexer_choose(const __grid_constant__ IndexerParams p) {
    SharedStorage& shared = *reinterpret_cast<SharedStorage*>(dynamic_shared());
    const u32 query = cta_index().x, sequence = query / p.sequence_queries;
    griddepcontrol_launch_dependents();
    griddepcontrol_wait();
    if (p.query_states && (FoundHeader::all_are_served(p) || QueryState::of(p, query).is_served)) return;
    const Scores scores = {reinterpret_cast<const u8*>(p.scores) + query * p.scores_row * 4,
                           visible_range(p, sequence, query % p.sequence_queries)};
    write_best(p, shared, gather_candidates(scores, shared, p.chosen), query);
}
