// Append to a quantized cache: one invocation per eight features of a
// head of a token. `kv_append_bytes.wgsl` precedes this file.

const EIGHTS: u32 = COLUMNS / 8u;

// A feature after the rotary embedding.
fn feature_of(head: Place, feature: u32) -> f32 {
    let own = load(head.source_at + feature);
    if (feature >= 2u * ROTARY_PAIRS) {
        return own;
    }
    var pair = feature / 2u;
    var other = feature ^ 1u;
    var is_second = (feature & 1u) == 1u;
    if (!INTERLEAVED) {
        is_second = feature >= ROTARY_PAIRS;
        pair = select(feature, feature - ROTARY_PAIRS, is_second);
        other = select(pair + ROTARY_PAIRS, pair, is_second);
    }
    let partner = load(head.source_at + other);
    let angle = angle_of(pair, head.position);
    return own * angle.x + select(-partner, partner, is_second) * angle.y;
}

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
    let head = item / EIGHTS;
    let column = item % EIGHTS * 8u;
    var to = Place();
    if (token < p.tokens && head < HEADS) {
        to = place_of(token, head);
    }
    var x = Eight();
    if (to.is_there) {
        for (var i = 0u; i < 4u; i++) {
            x.lo[i] = feature_of(to, column + i);
            x.hi[i] = feature_of(to, column + 4u + i);
        }
    }
    store_eight(x, head, to.written_at + column, to.is_there, thread);
}
