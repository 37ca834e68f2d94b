// Slice reduction within subgroups, then in workgroup memory.

// Subgroup size; 1 if subgroups are not full, because lanes
// then say nothing about slices.
var<private> lanes: u32 = 1u;

// Leaves the sums of all slices in `tile`: (TILE_M, LANES).
fn reduce(lane: u32, slice: u32, sums: ptr<function, Accumulators>) {
    // Slices of equal rows in a subgroup, LANES apart.
    let together = max(lanes / LANES, 1u);
    for (var apart = LANES; apart < lanes; apart *= 2u) {
        #for t TILE_M
        (*sums)[$t] += subgroupShuffleXor((*sums)[$t], apart);
        #end
    }
    let parts = SLICES / together;
    let part = slice / together;
    let at = part * TILE_M * LANES + lane;
    let leads = slice % together == 0u;
    if (leads) {
        #for t TILE_M
        tile[at + $tu * LANES] = bitcast<vec4<u32>>((*sums)[$t]);
        #end
    }
    add_parts(at, part, parts, leads);
}

@compute @workgroup_size(THREADS)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) index: u32,
    @builtin(subgroup_size) subgroup_size: u32,
    @builtin(num_subgroups) subgroups: u32,
    @builtin(subgroup_id) subgroup: u32,
    @builtin(subgroup_invocation_id) lane: u32,
) {
    let n0 = first_row(group, groups);
    if (n0 >= p.shape.stored_rows) {
        return;
    }
    var thread = index;
    // All subgroups are full if their lanes add up to THREADS.
    // Only then the lane determines the slice.
    if (subgroup_size * subgroups == THREADS) {
        lanes = subgroup_size;
        thread = subgroup * subgroup_size + lane;
    }
    begin(thread);
    tile_of_d(n0, group.y * TILE_M, thread);
}
