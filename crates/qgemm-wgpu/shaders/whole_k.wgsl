// Kernels whose workgroups have all of K of their tiles.

// The first row of W of a workgroup's tile: tiles along N that exceed one grid dimension continue along z.
fn first_row(group: vec3<u32>, groups: vec3<u32>) -> u32 {
    return rows_first() + (group.x + group.z * groups.x) * TILE_N;
}

// The packed k-tiles that a workgroup multiplies.
fn first_k_tile() -> u32 {
    return 0u;
}

fn end_k_tile() -> u32 {
    return k_tiles();
}
