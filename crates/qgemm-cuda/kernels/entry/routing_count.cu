// Expert lists: counts given
// expert ids, one chunk per CTA.
#include "mainloop/expert_lists.cuh"

extern "C" __global__ void __launch_bounds__(QG_THREADS) qg_routing_count(const __grid_constant__ RoutingParams p) {
    griddepcontrol_launch_dependents();
    griddepcontrol_wait();
    const ListStorage storage = ListStorage::of(dynamic_shared(), p.shape.experts, cta_threads() / 32);
    count_chunk(p, p.at.given_ids, cta_index().x, storage);
}
