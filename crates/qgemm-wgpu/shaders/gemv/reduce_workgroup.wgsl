// Sums of slices are added through workgroup memory.

// Leaves the sums of all slices in `tile`: (TILE_M, TILE_ROWS).
fn reduce(row: u32, slice: u32, sums: ptr<function, Sums>) {
    let at = slice * TILE_M * TILE_ROWS + row;
    #for t TILE_M
    tile[at + $tu * TILE_ROWS] = (*sums)[$t];
    #end
    workgroupBarrier();
    for (var half = SLICES / 2u; half > 0u; half /= 2u) {
        if (slice < half) {
            for (var t = 0u; t < TILE_M; t++) {
                tile[at + t * TILE_ROWS] += tile[at + (half * TILE_M + t) * TILE_ROWS];
            }
        }
        workgroupBarrier();
    }
}

@compute @workgroup_size(THREADS)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    // Tiles along N that exceed one grid dimension continue along z.
    let n0 = p.n_first + (group.x + group.z * groups.x) * TILE_N;
    if (n0 >= p.shape.n) {
        return;
    }
    begin(thread);
    tokens(group.y * TILE_M, n0, thread);
}
