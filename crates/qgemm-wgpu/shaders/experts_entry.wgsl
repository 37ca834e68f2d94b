// Entry point of MoE GEMM: tiles of W along x, row
// tiles along y and z.

@compute @workgroup_size(THREADS)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let n0 = group.x * TILE_N;
    if (n0 >= p.shape.stored_rows) {
        return;
    }
    if (!take_rows(group.y + group.z * groups.y)) {
        return;
    }
    begin(thread);
    tile_of_d(n0, 0u, thread);
}
