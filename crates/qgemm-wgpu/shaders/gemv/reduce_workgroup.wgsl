// Sums of slices are added through workgroup memory.

// Leaves the sums of all slices in `tile`: (TILE_M, LANES).
fn reduce(lane: u32, slice: u32, sums: ptr<function, Sums>) {
    let at = slice * TILE_M * LANES + lane;
    #for t TILE_M
    tile[at + $tu * LANES] = bitcast<vec4<u32>>((*sums)[$t]);
    #end
    add_parts(at, slice, SLICES, true);
}

@compute @workgroup_size(THREADS)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let n0 = first_row(group, groups);
    if (n0 >= p.shape.n) {
        return;
    }
    begin(thread);
    tokens(group.y * TILE_M, n0, thread);
}
