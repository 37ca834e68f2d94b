// The keys with the highest scores of a query, in the order of scores, from those that were gathered while all were scored: a CTA a query.
#include "atoms/cg_pair.cuh"
#include "mainloop/indexer_notes.cuh"
#include "mainloop/indexer_ranks.cuh"

// Keys of a query that were gathered, in no order.
struct GatheredKeys {
    const u8* keys;
    u32 count;

    template <class F>
    QG_DEVICE void each(const GatheredKeys& all, F&& visit) {
        const auto number = [&](u32 at) {
            const f32x2 v = ld_global_cg_f32x2(reinterpret_cast<const f32x2*>(all.keys) + at);
            return ranked(f32_to_bits(v.x), f32_to_bits(v.y));
        };
        each_number(all.count, number, visit);
    }
};

extern "C" __global__ void __launch_bounds__(QG_THREADS, CTAS) qg_indexer_choose_gathered(const __grid_constant__ IndexerParams p) {
    SharedStorage& shared = *reinterpret_cast<SharedStorage*>(dynamic_shared());
    const u32 query = cta_index().x;
    griddepcontrol_launch_dependents();
    griddepcontrol_wait();
    const QueryNote note = QueryNote::of(p, query);
    if (!note.has_all_wanted(p)) return;
    const GatheredKeys all = {gathered_keys(p, query), note.count};
    const Bound every = {1, 0};
    const Bound bound = note.count > MOST_GATHERED ? find_bound(all, shared, p.chosen, MOST_GATHERED) : every;
    const u32 found = reduce(shared, gather(all, shared, bound), p.chosen);
    write_chosen(p, shared, found, query);
}
