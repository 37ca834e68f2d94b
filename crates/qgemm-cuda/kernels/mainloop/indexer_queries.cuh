// Sparse-attention indexer: queries of a CTA
// that scores keys, their visible keys, and the
// queries that attend to any key of the CTA.
#pragma once
#include "atoms/bits.cuh"
#include "atoms/sync.cuh"
#include "atoms/warp.cuh"
#include "mainloop/indexer_records.cuh"

template <u32 MOST>
struct SeenQueries {
    u32 first[MOST], end[MOST];
    // Active queries, which attend to some key of
    // the CTA; and their number in each group of 32.
    u32 seeing[MOST], counts[MOST / 32];
};

// Stores the visible ranges of `count` queries from `first`
// on and returns the number of active ones. The CTA's keys
// are `keys` keys from `key` on, in steps of `key_step`.
// For inactive queries it writes masked scores, except for
// already served queries and when gathering. All `threads`
// threads, at least MOST, take part.
template <bool GATHERS = false, u32 MOST>
QG_DEVICE u32 note_queries(const IndexerParams& p, SeenQueries<MOST>& all, u32 sequence, u32 first, u32 count, u32 key, u32 keys,
                           u32 threads) {
    const u32 thread = thread_index(), first_key = key * p.key_step, end_key = (key + keys) * p.key_step;
    const auto sees_some = [&](const KeyRange& visible) { return visible.first < visible.end && visible.first < end_key && visible.end > first_key; };
    bool sees_any = false;
    if (thread < count) {
        KeyRange visible = visible_range(p, sequence, first + thread);
        if (!GATHERS && p.query_states != 0 && QueryState::of(p, (u64)sequence * p.sequence_queries + first + thread).is_served) visible = {~0u, 0};
        st_shared(&all.first[thread], visible.first);
        st_shared(&all.end[thread], visible.end);
        sees_any = sees_some(visible);
    }
    const u32 mask = ballot(sees_any);
    if (thread % 32 == 0 && thread < MOST) st_shared(&all.counts[thread / 32], popc(mask));
    cta_barrier();
    u32 before = popc(mask & ((1u << thread % 32) - 1)), total = 0;
#pragma unroll
    for (u32 i = 0; i < MOST / 32; i++) {
        const u32 of_warp = ld_shared(&all.counts[i]);
        if (i < thread / 32) before += of_warp;
        total += of_warp;
    }
    if (sees_any) st_shared(&all.seeing[before], thread);
    // Usually all queries are active.
    for (u32 query = !GATHERS && total < count ? 0 : count; query < count; query++) {
        const KeyRange visible = {ld_shared(&all.first[query]), ld_shared(&all.end[query])};
        if (sees_some(visible) || visible.first == ~0u) continue;
        const u64 row = ((u64)sequence * p.sequence_queries + first + query) * p.scores_row;
        for (u32 i = key + thread; i < least(key + keys, p.columns); i += threads)
            st_global_u32(reinterpret_cast<u8*>(p.scores) + (row + i) * 4, p.masked_score);
    }
    cta_barrier();
    return total;
}
