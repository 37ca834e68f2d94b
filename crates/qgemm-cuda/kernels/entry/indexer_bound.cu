// Sparse-attention indexer: score bound per query for
// gathering keys while they are scored. One CTA per
// query. Scores of every `key_step`-th key give a
// bound that slightly more keys reach than are wanted.
#include "mainloop/indexer_bins.cuh"
#include "mainloop/indexer_records.cuh"

// Sampled scores per thread, at most: 2048
// in total, and up to an eighth more.
constexpr u32 OWN_SAMPLES = 5;

// Four CTAs per SM hide each other's latency.
extern "C" __global__ void __launch_bounds__(QG_THREADS, 4) qg_indexer_bound(const __grid_constant__ IndexerParams p) {
    SharedStorage& shared = *reinterpret_cast<SharedStorage*>(dynamic_shared());
    const u32 query = cta_index().x, sequence = query / p.sequence_queries;
    griddepcontrol_launch_dependents();
    griddepcontrol_wait();
    const KeyRange visible = visible_range(p, sequence, query % p.sequence_queries);
    // NaN: gather every key.
    QueryState state = {bits_to_f32(0x7fffffffu), 0, {}};
    if (visible.first + MOST_GATHERED < visible.end) {
        const u32 first = (visible.first + p.key_step - 1) / p.key_step, end = (visible.end + p.key_step - 1) / p.key_step;
        const u32 count = least(end - first, OWN_SAMPLES * QG_THREADS);
        const u8* scores = reinterpret_cast<const u8*>(p.scores) + (query * p.scores_row + first) * 4;
        u32 places[OWN_SAMPLES];
#pragma unroll
        for (u32 i = 0; i < OWN_SAMPLES; i++) {
            const u32 at = i * QG_THREADS + thread_index();
            places[i] = at < count ? ld_global_u32(scores + at * 4) : ~0u;
        }
#pragma unroll
        for (u32 i = 0; i < OWN_SAMPLES; i++) places[i] = place_of(ranked(places[i], 0));
        // A rank up to an eighth above the target is close enough.
        const u32 of_sample = (u32)((u64)p.aim * count / (visible.end - visible.first)) + 1;
        // All keys with exactly the bound's score are gathered, too.
        const u32 place = find_place(shared, places, of_sample, of_sample + of_sample / 8);
        if (place >= LEAST_NUMBER) state.least = score_of_place(place);
    }
    if (thread_index() == 0) state.store(p, query);
    if (query == 0 && thread_index() == 0) FoundHeader::clear(p);
}
