// Sparse-attention indexer: top-k keys of a query, sorted by
// score, from the keys gathered during scoring. One CTA per query.
#include "atoms/cg_pair.cuh"
#include "mainloop/indexer_bins.cuh"
#include "mainloop/indexer_records.cuh"

QG_DEVICE u32x4 bits_of(f32x4 v) {
    return {f32_to_bits(v.x), f32_to_bits(v.y), f32_to_bits(v.z), f32_to_bits(v.w)};
}
// Mask of the lanes below the lowest lane of `lanes`.
QG_DEVICE u32 below_lowest(u32 lanes) {
    return (lanes & (0u - lanes)) - 1;
}

QG_DEVICE float load_score(const IndexerParams& p, u32 at) {
    return ld_global_cg_f32(reinterpret_cast<const float*>(found_score(p, at)));
}

// A gathered key, and the index of its score.
struct FoundKey {
    u32 key, score;

    // Key of the lowest lane of `lanes`.
    QG_DEVICE FoundKey of(const FoundRecord& record, u32 lanes, u32 first_key) {
        const u32 below = below_lowest(lanes);
        return {first_key + FoundRecord::key(popc(below)), record.first() + popc(record.lanes & below)};
    }
};

// Gathered keys of a query, unordered.
struct GatheredKeys {
    const IndexerParams* p;
    const u8* records;
    u32 count, first_key;

    // Records of all CTAs that scored visible keys.
    QG_DEVICE GatheredKeys of(const IndexerParams& p, u32 query) {
        const KeyRange visible = visible_range(p, query / p.sequence_queries, query % p.sequence_queries);
        const u32 first = visible.first / GATHER_KEYS * GATHER_KEYS;
        const u32 end = visible.first < visible.end ? (visible.end + GATHER_KEYS - 1) / GATHER_KEYS * GATHER_KEYS : first;
        return {&p, found_record(p, query + 1, first), (end - first) / RECORD_KEYS, first};
    }

    template <class F>
    QG_DEVICE void each(const GatheredKeys& all, F&& visit) {
        for (u32 base = 0; base < all.count; base += QG_THREADS) {
            const u32 at = base + thread_index();
            FoundRecord record = {};
            if (at < all.count) {
                const f32x2 v = ld_global_cg_f32x2(reinterpret_cast<const f32x2*>(all.records) + at);
                record = {f32_to_bits(v.x), f32_to_bits(v.y)};
            }
            for (u32 lanes = record.own(); ballot(lanes != 0) != 0;) {
                u64 values[TOGETHER];
#pragma unroll
                for (u32 i = 0; i < TOGETHER; i++) {
                    values[i] = 0;
                    if (lanes == 0) continue;
                    const FoundKey found = FoundKey::of(record, lanes, all.first_key + at * RECORD_KEYS);
                    values[i] = ranked(score_bits(load_score(*all.p, found.score)), found.key);
                    lanes &= lanes - 1;
                }
                visit(values);
            }
        }
    }
};

// Record pairs that a thread loads at once.
constexpr u32 OWN_PAIRS = 2;

// Lists keys and score indices in `gathered`, up to
// its capacity, and returns their number. Sets
// `inside` if some scores were lost for lack of space.
QG_DEVICE u32 list_keys(const GatheredKeys& all, SharedStorage& shared) {
    const u32 thread = thread_index(), lane = thread % 32;
    if (thread == 0) st_shared(&shared.inside, 0u);
    clear_count(shared);
    for (u32 base = 0; base < all.count; base += QG_THREADS * 2 * OWN_PAIRS) {
        FoundRecord records[OWN_PAIRS][2];
        u32 own = 0;
        bool are_lost = false;
#pragma unroll
        for (u32 i = 0; i < OWN_PAIRS; i++) {
            const u32 at = base + (i * QG_THREADS + thread) * 2;
            u32x4 v = {0, 0, 0, 0};
            if (at < all.count) v = bits_of(ld_global_cg_f32x4(reinterpret_cast<const f32x4*>(all.records + at * sizeof(FoundRecord))));
            records[i][0] = {v.x, v.y}, records[i][1] = {v.z, v.w};
        }
#pragma unroll
        for (u32 i = 0; i < 2 * OWN_PAIRS; i++) {
            const FoundRecord& record = records[i / 2][i % 2];
            own += popc(record.own());
            are_lost |= record.own() != 0 && record.first() < CHUNK;
        }
        if (are_lost) reduce_add_shared(&shared.inside, 1);
        u32 upto = own;
#pragma unroll
        for (u32 step = 1; step < 32; step *= 2) {
            const u32 before = shfl_idx_u32(upto, lane - step);
            if (lane >= step) upto += before;
        }
        u32 to = 0;
        if (lane == 31) to = atomic_add_shared(&shared.count, upto);
        to = shfl_idx_u32(to, 31) + upto - own;
#pragma unroll
        for (u32 i = 0; i < 2 * OWN_PAIRS; i++) {
            const FoundRecord& record = records[i / 2][i % 2];
            const u32 first_key = all.first_key + (base + (i / 2 * QG_THREADS + thread) * 2 + i % 2) * RECORD_KEYS;
            for (u32 lanes = record.own(); lanes != 0; lanes &= lanes - 1, to++) {
                const FoundKey found = FoundKey::of(record, lanes, first_key);
                if (to < MOST_GATHERED) st_shared(&shared.gathered[to], (u64)found.key << 32 | found.score);
            }
        }
    }
    cta_barrier();
    return ld_shared(&shared.count);
}

// Replaces `found` listed entries by ranked scores.
QG_DEVICE void load_numbers(const IndexerParams& p, SharedStorage& shared, u32 found) {
    float own[THREAD_GATHERED];
#pragma unroll
    for (u32 i = 0; i < THREAD_GATHERED; i++) {
        const u32 at = i * QG_THREADS + thread_index();
        own[i] = at < found ? load_score(p, (u32)ld_shared(&shared.gathered[at])) : 0.0f;
    }
#pragma unroll
    for (u32 i = 0; i < THREAD_GATHERED; i++) {
        const u32 at = i * QG_THREADS + thread_index();
        if (at < found) st_shared(&shared.gathered[at], ranked(score_bits(own[i]), (u32)(ld_shared(&shared.gathered[at]) >> 32)));
    }
    cta_barrier();
}

// Many queries: three CTAs per SM.
extern "C" __global__ void __launch_bounds__(QG_THREADS, 3) qg_indexer_choose_gathered(const __grid_constant__ IndexerParams p) {
    SharedStorage& shared = *reinterpret_cast<SharedStorage*>(dynamic_shared());
    const u32 query = cta_index().x;
    griddepcontrol_launch_dependents();
    griddepcontrol_wait();
    QueryState state = QueryState::of(p, query);
    const GatheredKeys all = GatheredKeys::of(p, query);
    u32 found = list_keys(all, shared);
    const bool has_all = ld_shared(&shared.inside) == 0 && (found >= p.chosen || state.least != state.least);
    if (thread_index() == 0) {
        state.is_served = has_all;
        state.store(p, query);
        if (!has_all) atomic_add_relaxed(FoundHeader::misled_queries(p), 1);
    }
    if (!has_all) return;
    if (found <= MOST_GATHERED)
        load_numbers(p, shared, found);
    else
        found = gather(all, shared, find_bound(all, shared, p.chosen, MOST_GATHERED));
    write_best(p, shared, found, query);
}
