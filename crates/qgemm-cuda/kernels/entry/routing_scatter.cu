// Expert lists: writes the slots of one chunk
// per CTA, at offsets from the scan of counts.
#include "mainloop/expert_lists.cuh"

extern "C" __global__ void __launch_bounds__(QG_THREADS) qg_routing_scatter(const __grid_constant__ RoutingParams p) {
    const u32 experts = p.shape.experts, warp = thread_index() / 32, warps = cta_threads() / 32;
    const u32 chunk = cta_index().x;
    const ListStorage storage = ListStorage::of(dynamic_shared(), experts, warps);
    griddepcontrol_launch_dependents();
    griddepcontrol_wait();
    const SlotRange of_chunk = SlotRange::of_chunk(p, chunk);
    const SlotRange range = SlotRange::of_warp(of_chunk, warp, warps);
    const SlotIds first_rows = SlotIds::load(p, p.at.given_ids, range, range.first);
    for (u32 e = thread_index(); e < experts; e += cta_threads())
        st_shared(&storage.offsets[e], ld_global_u32(chunk_count(p, p.shape.chunks, e)));
    clear_counts(storage, experts);
    counts_to_offsets(storage, experts);
    if (chunk == 0) store_offsets(p, storage);
    u32* of_warp = storage.of_warps + warp * experts;
    count_slots(p, p.at.given_ids, range, first_rows, of_warp);
    cta_barrier();
    for (u32 e = thread_index(); e < experts; e += cta_threads())
        counts_to_places(storage, experts, e, ld_global_u32(chunk_count(p, chunk, e)));
    cta_barrier();
    scatter_slots(p, p.at.given_ids, range, first_rows, of_warp, storage.offsets);
    fill_rest(p, of_chunk, ld_shared(&storage.offsets[experts]));
}
