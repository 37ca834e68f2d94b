// Append to an f32, f16 or bf16 cache: one invocation
// per pair of features, either a rotary pair or two
// adjacent features beyond the rotary dimension.
// `kv_append_elements.wgsl` precedes this file.

@compute @workgroup_size(THREADS)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    // Workgroups of a token are adjacent.
    let place = group.x + group.y * groups.x;
    let token = place / GROUPS_A_TOKEN;
    let item = place % GROUPS_A_TOKEN * THREADS + thread;
    let head = item / (COLUMNS / 2u);
    let pair = item % (COLUMNS / 2u);
    if (token >= p.tokens || head >= HEADS) {
        return;
    }
    let to = place_of(token, head);
    if (!to.is_there) {
        return;
    }
    let is_rotated = pair < ROTARY_PAIRS;
    var features = vec2<u32>(2u * pair, 2u * pair + 1u);
    if (is_rotated && !INTERLEAVED) {
        features = vec2<u32>(pair, pair + ROTARY_PAIRS);
    }
    var values = vec2<f32>(load(to.source_at + features.x), load(to.source_at + features.y));
    if (is_rotated) {
        let angle = angle_of(pair, to.position);
        values = vec2<f32>(values.x * angle.x - values.y * angle.y, values.y * angle.x + values.x * angle.y);
    }
    let at = p.written_base + to.written_at;
    store(at + features.x, values.x);
    store(at + features.y, values.y);
}
