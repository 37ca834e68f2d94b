// Routing histogram: slots per expert, one chunk per workgroup.
// The order of additions does not matter.

var<workgroup> own_counts: array<atomic<u32>, MOST_EXPERTS>;
var<workgroup> bad: atomic<u32>;

@compute @workgroup_size(THREADS)
fn main(@builtin(workgroup_id) group: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
    let chunk = group.x;
    for (var e = thread; e < p.shape.experts; e += THREADS) {
        atomicStore(&own_counts[e], 0u);
    }
    if (thread == 0u) {
        atomicStore(&bad, NO_SLOT);
    }
    workgroupBarrier();
    for (var slot = first_slot(chunk) + thread; slot < last_slot(chunk); slot += THREADS) {
        let id = ids[p.ids_base + slot];
        if (id < p.shape.experts) {
            atomicAdd(&own_counts[id], 1u);
        } else if (id != ELSEWHERE) {
            atomicMin(&bad, slot);
        }
    }
    workgroupBarrier();
    if (thread == 0u) {
        workspace[p.workspace_base + chunk] = atomicLoad(&bad);
    }
    if (has(FLAG_LISTS)) {
        for (var e = thread; e < p.shape.experts; e += THREADS) {
            workspace[place_of_count(chunk, e)] = atomicLoad(&own_counts[e]);
        }
    }
}
