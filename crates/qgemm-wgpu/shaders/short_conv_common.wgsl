// Short causal depthwise convolution: parts of both shaders.

// Tokens of a sequence.
struct Span {
    token: u32,
    count: u32,
}

// Offsets are clamped, whatever they are.
fn span_of(sequence: u32) -> Span {
    let most = p.shape.most_queries;
    if ((p.shape.flags & FLAG_Q_OFFSETS) == 0u) {
        return Span(sequence * most, most);
    }
    let token = min(q_offsets[p.q_offsets_base + sequence], p.shape.tokens);
    let end = min(q_offsets[p.q_offsets_base + sequence + 1u], p.shape.tokens);
    return Span(token, min(max(end, token) - token, most));
}

// The state that a sequence has: its first element, and
// whether there is one.
struct Slot {
    first: u32,
    is_present: bool,
}

fn slot_of(sequence: u32) -> Slot {
    if (p.shape.slots == 0u) {
        return Slot(0u, false);
    }
    let index = slots[p.slots_base + sequence];
    return Slot(p.state_base + index * p.slot_stride, index < p.shape.slots);
}

// Two inputs from `channel` on, with their gates. A
// channel behind the last is 0.
fn input(token: u32, channel: u32) -> vec2<f32> {
    let dtype = p.shape.dtype;
    let count = min(p.shape.channels - channel, 2u);
    var pair = vec2<f32>();
    for (var i = 0u; i < count; i++) {
        let at = p.x_base + token * p.x_row + channel + i;
        pair[i] = element(x_words[word_of(at, dtype)], at, dtype);
        if ((p.shape.flags & FLAG_INPUT_GATE) != 0u) {
            let of_gate = p.input_gate_base + token * p.input_gate_row + channel + i;
            let gate = element(input_gate_words[word_of(of_gate, dtype)], of_gate, dtype);
            pair[i] = rounded_to(pair[i] * gate, dtype);
        }
    }
    return pair;
}
