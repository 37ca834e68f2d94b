// Kernels whose workgroups have a part of K each. The sums of a part are a matrix in f32, as are those of the others, which follow
// one another; `gemm_sum.wgsl` adds them up.

@group(0) @binding(8) var<storage, read_write> part_sums: array<f32>;

// The workgroup's part.
var<private> part: u32;

// The first row of W of a workgroup's tile; parts follow one another along z.
fn first_row(group: vec3<u32>, groups: vec3<u32>) -> u32 {
    part = group.z;
    return rows_first() + group.x * TILE_N;
}

// Where part `i` begins. Parts are whole quanta of k-tiles, so that no block of columns that share a factor of X is cut.
fn part_begin(i: u32) -> u32 {
    let quanta = (k_tiles() + QUANTUM_K_TILES - 1u) / QUANTUM_K_TILES;
    return min(i * quanta / splits() * QUANTUM_K_TILES, k_tiles());
}

// The packed k-tiles that a workgroup multiplies.
fn first_k_tile() -> u32 {
    return part_begin(part);
}

fn end_k_tile() -> u32 {
    return part_begin(part + 1u);
}

// Stores the sums of rows `row .. row + 4` and `row + 8 .. row + 12` for token `token`. A matrix has whole tiles of rows.
fn store8(token: u32, row: u32, low: vec4<f32>, high: vec4<f32>) {
    let at = p.d_base + (part * p.shape.m + token) * p.d_row + row;
    for (var i = 0u; i < 4u; i++) {
        part_sums[at + i] = low[i];
        part_sums[at + 8u + i] = high[i];
    }
}
