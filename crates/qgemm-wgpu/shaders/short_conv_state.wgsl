// Short causal depthwise convolution: the new state.
// An invocation has two channels of a sequence. It reads a row
// before it overwrites it.

struct Params {
    shape: ShortConvShape,
    first: u32,           // tokens of this dispatch
    end: u32,
    x_row: u32,           // elements between rows
    input_gate_row: u32,
    slot_stride: u32,     // elements between slots
    x_base: u32,          // of token 0, as in `short_conv.wgsl`
    input_gate_base: u32,
    q_offsets_base: u32,
    slots_base: u32,
    advance_base: u32,
    state_base: u32,
}

var<immediate> p: Params;

@group(0) @binding(0) var<storage, read> x_words: array<u32>;
@group(0) @binding(1) var<storage, read> q_offsets: array<u32>;
@group(0) @binding(2) var<storage, read> slots: array<u32>;
@group(0) @binding(3) var<storage, read> advance: array<u32>;
@group(0) @binding(4) var<storage, read> input_gate_words: array<u32>;
@group(0) @binding(5) var<storage, read_write> state: array<atomic<u32>>;

@compute @workgroup_size(THREADS)
fn main(
    @builtin(workgroup_id) group: vec3<u32>,
    @builtin(num_workgroups) groups: vec3<u32>,
    @builtin(local_invocation_index) thread: u32,
) {
    let of_sequence = (p.shape.channels + 2u * THREADS - 1u) / (2u * THREADS);
    let index = group.x + group.y * groups.x;
    let sequence = index / of_sequence;
    let channel = ((index % of_sequence) * THREADS + thread) * 2u;
    if (sequence >= p.shape.sequences || channel >= p.shape.channels) {
        return;
    }
    let span = span_of(sequence);
    let slot = slot_of(sequence);
    if (span.count == 0u || !slot.is_present) {
        return;
    }
    var entering = span.count;
    if ((p.shape.flags & FLAG_ADVANCE) != 0u) {
        entering = min(entering, advance[p.advance_base + sequence]);
    }
    // The dispatch of the last token that enters.
    let last = span.token + max(entering, 1u) - 1u;
    if (last < p.first || last >= p.end) {
        return;
    }
    let dtype = p.shape.dtype;
    let count = min(p.shape.channels - channel, 2u);
    let rows = p.shape.width - 1u;
    for (var row = 0u; row < rows; row++) {
        var pair = vec2<f32>();
        if (row + entering >= rows) {
            pair = input(span.token + entering + row - rows, channel);
        } else if ((p.shape.flags & FLAG_FROM_ZEROS) == 0u) {
            for (var i = 0u; i < count; i++) {
                pair[i] = load_state(slot.first + (row + entering) * p.shape.channels + channel + i, dtype);
            }
        }
        store_state(slot.first + row * p.shape.channels + channel, count, dtype, pair);
    }
}
