// Split-K: each workgroup has part of K.
// The partial sums of each part are an f32 matrix.
// `gemm_sum.wgsl` adds these matrices.

@group(0) @binding(8) var<storage, read_write> part_sums: array<f32>;

// The workgroup's part of K.
var<private> part: u32;

// First row of W of the workgroup's tile; parts run along z.
fn first_row(group: vec3<u32>, groups: vec3<u32>) -> u32 {
    part = group.z;
    return rows_first() + group.x * TILE_N;
}

// Start of part `i`.
// A part is a multiple of QUANTUM_K_TILES:
// columns that share a scale of X stay together.
fn part_begin(i: u32) -> u32 {
    let quanta = (k_tiles() + QUANTUM_K_TILES - 1u) / QUANTUM_K_TILES;
    return min(i * quanta / splits() * QUANTUM_K_TILES, k_tiles());
}

// The workgroup's range of packed k-tiles.
fn first_k_tile() -> u32 {
    return part_begin(part);
}

fn end_k_tile() -> u32 {
    return part_begin(part + 1u);
}

// Stores rows `row .. row + 4` and
// `row + 8 .. row + 12` of token `token`.
// The matrix has whole tiles of rows.
fn store8(token: u32, row: u32, low: vec4<f32>, high: vec4<f32>) {
    let at = p.d_base + (part * p.shape.m + token) * p.d_row + row;
    for (var i = 0u; i < 4u; i++) {
        part_sums[at + i] = low[i];
        part_sums[at + 8u + i] = high[i];
    }
}
