// Split-K reduction of `part_of_k.wgsl`, in part
// order, with the epilogue. An invocation has eight
// rows of W for one token.

@group(0) @binding(0) var<storage, read> part_sums: array<vec4<f32>>;

// Four sums of part `i`; a token has `vectors` vectors.
fn part_of(i: u32, token: u32, vectors: u32, vector: u32) -> vec4<f32> {
    return part_sums[p.x_base + (i * p.shape.m + token) * vectors + vector];
}

@compute @workgroup_size(THREADS)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let vectors = (p.shape.stored_rows + TILE_ROWS - 1u) / TILE_ROWS * (TILE_ROWS / 4u);
    let place = (group.x + group.y * groups.x) * THREADS + thread;
    let token = place / (vectors / 2u);
    // First or second four rows of a tile.
    // The invocation also has the four rows eight further.
    let half = place % (vectors / 2u);
    let vector = half / 2u * 4u + half % 2u;
    if (token >= p.shape.m || vector * 4u >= p.shape.stored_rows) {
        return;
    }
    var low: vec4<f32>;
    var high: vec4<f32>;
    for (var i = 0u; i < splits(); i++) {
        low += part_of(i, token, vectors, vector);
        high += part_of(i, token, vectors, vector + 2u);
    }
    store8(token, vector * 4u, low, high);
}
