// Kernels without split-K.

// First row of W of the workgroup's tile.
// Tiles along N past one grid dimension continue along z.
fn first_row(group: vec3<u32>, groups: vec3<u32>) -> u32 {
    return rows_first() + (group.x + group.z * groups.x) * TILE_N;
}

// The workgroup's range of packed k-tiles.
fn first_k_tile() -> u32 {
    return 0u;
}

fn end_k_tile() -> u32 {
    return k_tiles();
}
