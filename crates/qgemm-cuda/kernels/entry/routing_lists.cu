// Expert lists of few slots:
// each CTA counts all ids.
#include "mainloop/expert_lists.cuh"

extern "C" __global__ void __launch_bounds__(QG_THREADS) qg_routing_lists(const __grid_constant__ RoutingParams p) {
    griddepcontrol_launch_dependents();
    griddepcontrol_wait();
    make_lists(p, p.at.given_ids, ListStorage::of(dynamic_shared(), p.shape.experts, cta_threads() / 32));
}
