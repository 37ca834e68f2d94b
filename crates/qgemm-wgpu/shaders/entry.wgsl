// Entry point of kernels with a linear thread index.
// The family's `tile_of_d(n0, m0, thread)` computes the tile:
// rows of W from `n0` on, tokens from `m0` on.

@compute @workgroup_size(THREADS)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let n0 = first_row(group, groups);
    if (n0 >= p.shape.stored_rows) {
        return;
    }
    begin(thread);
    tile_of_d(n0, group.y * TILE_M, thread);
}
