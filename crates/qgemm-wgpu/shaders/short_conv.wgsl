// Short causal depthwise convolution: the result.
// An invocation has two channels of a token.
// `*_base` offsets count elements (see `params.wgsl`).
// Rows of tokens are counted from token 0. It may
// lie before the binding: these offsets wrap.

struct Params {
    shape: ShortConvShape,
    first: u32,           // tokens of this dispatch
    end: u32,
    x_row: u32,           // elements between rows
    input_gate_row: u32,
    output_gate_row: u32,
    d_row: u32,
    slot_stride: u32,     // elements between slots
    x_base: u32,
    weight_base: u32,
    bias_base: u32,
    q_offsets_base: u32,
    slots_base: u32,
    input_gate_base: u32,
    output_gate_base: u32,
    state_base: u32,
    d_base: u32,
}

var<immediate> p: Params;

@group(0) @binding(0) var<storage, read> x_words: array<u32>;
@group(0) @binding(1) var<storage, read> weight: array<f32>;
@group(0) @binding(2) var<storage, read> bias: array<f32>;
@group(0) @binding(3) var<storage, read> q_offsets: array<u32>;
@group(0) @binding(4) var<storage, read> slots: array<u32>;
@group(0) @binding(5) var<storage, read> input_gate_words: array<u32>;
@group(0) @binding(6) var<storage, read> output_gate_words: array<u32>;
@group(0) @binding(7) var<storage, read> state_words: array<u32>;
@group(0) @binding(8) var<storage, read_write> d: array<atomic<u32>>;

// The last sequence that begins
// at or before a token, or the first.
fn sequence_at(token: u32) -> u32 {
    if ((p.shape.flags & FLAG_Q_OFFSETS) == 0u) {
        return token / p.shape.most_queries;
    }
    var first = 0u;
    var count = p.shape.sequences;
    while (count > 1u) {
        let half = count / 2u;
        if (q_offsets[p.q_offsets_base + first + half] <= token) {
            first += half;
            count -= half;
        } else {
            count = half;
        }
    }
    return first;
}

// Two inputs before the first token:
// a row of the state, or 0.
fn stored(slot: Slot, row: u32, channel: u32) -> vec2<f32> {
    let dtype = p.shape.dtype;
    var pair = vec2<f32>();
    if (slot.is_present && (p.shape.flags & FLAG_FROM_ZEROS) == 0u) {
        for (var i = 0u; i < min(p.shape.channels - channel, 2u); i++) {
            let at = slot.first + row * p.shape.channels + channel + i;
            pair[i] = element(state_words[word_of(at, dtype)], at, dtype);
        }
    }
    return pair;
}

fn silu(v: vec2<f32>) -> vec2<f32> {
    let x = clamp(v, vec2<f32>(-100.0), vec2<f32>(100.0));
    let e = exp(-abs(x));
    return v * (select(vec2<f32>(1.0), e, x < vec2<f32>()) / (vec2<f32>(1.0) + e));
}

@compute @workgroup_size(THREADS)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let of_token = (p.shape.channels + 2u * THREADS - 1u) / (2u * THREADS);
    let index = group.x + group.y * groups.x;
    let token = p.first + index / of_token;
    let channel = ((index % of_token) * THREADS + thread) * 2u;
    if (token >= p.end || channel >= p.shape.channels) {
        return;
    }
    let sequence = sequence_at(token);
    let span = span_of(sequence);
    if (token < span.token || token - span.token >= span.count) {
        return;
    }
    let count = min(p.shape.channels - channel, 2u);
    let slot = slot_of(sequence);
    let before = p.shape.width - 1u;
    var sums = vec2<f32>();
    if ((p.shape.flags & FLAG_BIAS) != 0u) {
        for (var i = 0u; i < count; i++) {
            sums[i] = bias[p.bias_base + channel + i];
        }
    }
    for (var tap = 0u; tap < p.shape.width; tap++) {
        let place = token - span.token + tap;
        var inputs = vec2<f32>();
        if (place < before) {
            inputs = stored(slot, place, channel);
        } else {
            inputs = input(token + tap - before, channel);
        }
        for (var i = 0u; i < count; i++) {
            sums[i] += weight[p.weight_base + (channel + i) * p.shape.width + tap] * inputs[i];
        }
    }
    if ((p.shape.flags & FLAG_SILU) != 0u) {
        sums = silu(sums);
    }
    if ((p.shape.flags & FLAG_OUTPUT_GATE) != 0u) {
        for (var i = 0u; i < count; i++) {
            let at = p.output_gate_base + token * p.output_gate_row + channel + i;
            sums[i] *= element(output_gate_words[word_of(at, p.shape.dtype)], at, p.shape.dtype);
        }
    }
    store_d(p.d_base + token * p.d_row + channel, count, p.shape.dtype, sums);
}
