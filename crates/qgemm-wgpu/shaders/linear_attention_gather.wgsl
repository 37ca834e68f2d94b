// Linear attention: small operands in one buffer, because an adapter
// has fewer bindings than the operation has operands.
// Records of sequences, then factors of V, decay rates, and
// the summands of `a`.

struct Params {
    sequences: u32,
    tokens: u32,
    most_tokens: u32,
    slots: u32,
    a_log_base: u32,
    dt_bias_base: u32,
    q_offsets_base: u32,
    slots_base: u32,
    advance_base: u32,
    pending_base: u32,
    skip_base: u32,
    gathered_base: u32,
}

var<immediate> p: Params;

@group(0) @binding(0) var<storage, read> a_log: array<u32>;
@group(0) @binding(1) var<storage, read> dt_bias: array<u32>;
@group(0) @binding(2) var<storage, read> q_offsets: array<u32>;
@group(0) @binding(3) var<storage, read> slot_indices: array<u32>;
@group(0) @binding(4) var<storage, read> advances: array<u32>;
@group(0) @binding(5) var<storage, read> pendings: array<u32>;
@group(0) @binding(6) var<storage, read> skips: array<u32>;
@group(0) @binding(7) var<storage, read_write> gathered: array<u32>;

// exp(x) of any sign.
fn exponential(x: f32) -> f32 {
    let below = exp_nonpositive(-abs(x));
    return select(below, 1.0 / below, x > 0.0);
}

// First token, tokens, tokens that enter the state, first tokens
// without output, and slot of a sequence.
fn write_record(sequence: u32) {
    var first = sequence * p.most_tokens;
    var count = p.most_tokens;
    if (Q_OFFSETS) {
        first = min(q_offsets[p.q_offsets_base + sequence], p.tokens);
        let end = min(q_offsets[p.q_offsets_base + sequence + 1u], p.tokens);
        count = min(max(end, first) - first, p.most_tokens);
    }
    var advance = count;
    if (ADVANCE) {
        advance = min(advances[p.advance_base + sequence], count);
    }
    var pending = 0u;
    if (PENDING) {
        pending = pendings[p.pending_base + sequence];
    }
    // A negative slot is beyond all slots.
    var slot = sequence;
    if (SLOTS) {
        slot = slot_indices[p.slots_base + sequence];
    }
    let record = p.gathered_base + sequence * RECORD_WORDS;
    gathered[record] = first;
    gathered[record + 1u] = count;
    gathered[record + 2u] = advance;
    gathered[record + 3u] = pending;
    gathered[record + 4u] = select(NO_SLOT, slot, slot < p.slots);
}

@compute @workgroup_size(THREADS)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let i = (group.x + group.y * groups.x) * THREADS + thread;
    if (i < p.sequences) {
        write_record(i);
    }
    let of_heads = p.gathered_base + p.sequences * RECORD_WORDS;
    if (i < HEADS) {
        if (SKIP) {
            gathered[of_heads + i] = skips[p.skip_base + i];
        }
        if (MADE) {
            gathered[of_heads + HEADS + i] = bitcast<u32>(exponential(bitcast<f32>(a_log[p.a_log_base + i])));
        }
    }
    if (MADE && i < TOKEN_DECAYS) {
        gathered[of_heads + 2u * HEADS + i] = dt_bias[p.dt_bias_base + i];
    }
}
