// Short causal depthwise convolution, with the last inputs as state.
// A thread has eight channels of aligned rows, otherwise one,
// and walks the tokens of a tile.
// The CTA with a sequence's first token computes all tokens that
// need the old state, and writes the new one: no other CTA reads it.
#include "atoms/bits.cuh"
#include "atoms/launch.cuh"
#include "atoms/sync.cuh"
#include "atoms/warp.cuh"
#include "epilogue/activation.cuh"
#include "epilogue/operands.cuh"

struct ShortConvParams {
    ShortConvShape shape;
    ShortConvPointers at;
};

constexpr u32 BYTES = QG_X_DTYPE == DTYPE_F32 ? 4 : 2;
// Tokens whose loads are in flight together.
constexpr u32 AT_ONCE = 8 / BYTES;
// Taps of the widest kernel.
constexpr u32 TAPS = 4;

// Tokens of a sequence.
struct Span {
    u32 token, count;
};

QG_DEVICE u32 least(u32 a, u32 b) {
    return a < b ? a : b;
}
QG_DEVICE u32 word_at(u64 address, u64 i) {
    return ld_global_u32(reinterpret_cast<const u8*>(address) + i * 4);
}

// Offsets are clamped: their content makes no access go out of bounds.
QG_DEVICE Span span_of(const ShortConvParams& p, u32 sequence) {
    const u32 most = p.shape.most_queries;
    if (p.at.q_offsets == 0) return {sequence * most, most};
    const u32 token = least(word_at(p.at.q_offsets, sequence), p.shape.tokens);
    const u32 end = least(word_at(p.at.q_offsets, sequence + 1), p.shape.tokens);
    return {token, least(end > token ? end - token : 0, most)};
}

// The last sequence that begins at or before `token`, or the first.
// Offsets ascend; a warp searches 32-ary. Warp-collective.
QG_DEVICE u32 sequence_at(const ShortConvParams& p, u32 token) {
    if (p.at.q_offsets == 0) return token / p.shape.most_queries;
    const u32 lane = thread_index() % 32;
    u32 first = 0, count = p.shape.sequences;
    do {
        const u32 step = (count + 31) / 32, at = lane * step;
        const u32 begun = popc(ballot(at < count && word_at(p.at.q_offsets, first + at) <= token));
        if (begun == 0) return 0;
        first += (begun - 1) * step;
        count = least(step, count - (begun - 1) * step);
    } while (count > 1);
    return first;
}

// V adjacent stored numbers, V = 1 or 8.
template <u32 V>
struct Stored {
    static constexpr u32 WORDS = V == 1 ? 1 : V * BYTES / 4;
    u32 words[WORDS];

    QG_DEVICE void load(Stored& s, u64 base, u64 element) {
        const u8* at = reinterpret_cast<const u8*>(base) + element * BYTES;
        if constexpr (V == 1) {
            s.words[0] = BYTES == 4 ? ld_global_u32(at) : ld_global_cached_u16(at);
        } else {
#pragma unroll
            for (u32 i = 0; i < WORDS; i += 4) {
                const u32x4 v = ld_global_v4(at + i * 4);
                s.words[i] = v.x, s.words[i + 1] = v.y, s.words[i + 2] = v.z, s.words[i + 3] = v.w;
            }
        }
    }
    QG_DEVICE void store(const Stored& s, u64 base, u64 element) {
        u8* at = reinterpret_cast<u8*>(base) + element * BYTES;
        if constexpr (V == 8) {
#pragma unroll
            for (u32 i = 0; i < WORDS; i += 4)
                st_global_v4(at + i * 4, u32x4{s.words[i], s.words[i + 1], s.words[i + 2], s.words[i + 3]});
        } else if constexpr (BYTES == 4) {
            st_global_u32(at, s.words[0]);
        } else {
            st_global_u16(at, s.words[0]);
        }
    }
    QG_DEVICE float number(const Stored& s, u32 i) {
        if constexpr (BYTES == 4) return bits_to_f32(s.words[i]);
        return half_to_f32(QG_X_DTYPE, s.words[i / 2] >> (i % 2 * 16) & 0xffffu);
    }
    // Rounds V numbers.
    QG_DEVICE Stored of(const float (&v)[V]) {
        Stored s;
#pragma unroll
        for (u32 i = 0; i < WORDS; i++) {
            if constexpr (BYTES == 4)
                s.words[i] = f32_to_bits(v[i]);
            else if constexpr (V == 1)
                s.words[i] = f32_to_half(QG_X_DTYPE, v[i]);
            else
                s.words[i] = f32_to_half(QG_X_DTYPE, v[2 * i]) | f32_to_half(QG_X_DTYPE, v[2 * i + 1]) << 16;
        }
        return s;
    }
    // Multiplies by a gate, and rounds.
    QG_DEVICE void multiply(Stored& s, const Stored& gate) {
        float products[V];
#pragma unroll
        for (u32 i = 0; i < V; i++) products[i] = number(s, i) * number(gate, i);
        s = of(products);
    }
};

// State of a sequence: its first element for a thread.
struct Slot {
    u64 first;
    bool is_present;

    QG_DEVICE Slot of(const ShortConvParams& p, u32 sequence, u32 channel) {
        if (p.at.state == 0) return {0, false};
        const u32 index = word_at(p.at.slots, sequence);
        return {index * p.at.slot_stride + channel, index < p.shape.slots};
    }
};

// V channels of a thread, from `channel` on.
template <u32 V>
struct Lane {
    using Row = Stored<V>;
    u32 channel;

    // An input, with its gate.
    QG_DEVICE void load_input(const Lane& lane, Row& u, const ShortConvParams& p, u64 token) {
        Row::load(u, p.at.x, token * p.at.x_row + lane.channel);
        if (p.at.input_gate == 0) return;
        Row gate;
        Row::load(gate, p.at.input_gate, token * p.at.input_gate_row + lane.channel);
        Row::multiply(u, gate);
    }
    // A row of the old state; zeros without one.
    QG_DEVICE void load_state(Row& u, const ShortConvParams& p, const Slot& slot, u32 row) {
        if (slot.is_present && !(p.shape.flags & QG_FLAG_FROM_ZEROS)) {
            Row::load(u, p.at.state, slot.first + row * p.shape.channels);
        } else {
#pragma unroll
            for (u32 i = 0; i < Row::WORDS; i++) u.words[i] = 0;
        }
    }
    // The state after `entering` tokens. Rows ascend: a row
    // is read before it is overwritten.
    QG_DEVICE void store_state(const Lane& lane, const ShortConvParams& p, u32 begin, u32 entering, const Slot& slot) {
        const u32 rows = p.shape.width - 1;
#pragma unroll 1
        for (u32 row = 0; row < rows; row++) {
            Row u;
            if (row + entering < rows)
                load_state(u, p, slot, row + entering);
            else
                load_input(lane, u, p, (u64)begin + entering + row - rows);
            Row::store(u, p.at.state, slot.first + row * p.shape.channels);
        }
    }
};

// The convolution of V channels. A narrower kernel has zeros as its
// oldest taps and inputs: less code than a loop for each width.
template <u32 V>
struct Convolution {
    using Row = Stored<V>;
    // [channel][tap]
    float weights[V * TAPS];
    float bias[V];
    // The last inputs, oldest first.
    float window[TAPS - 1][V];

    QG_DEVICE void load_weights(Convolution& c, const ShortConvParams& p, u32 channel) {
        const bool is_aligned = p.shape.flags & QG_FLAG_BIAS_ALIGNED16;
        const u32 width = p.shape.width, absent = TAPS - width;
        if (V == 8 && width == TAPS && is_aligned) {
            const u8* at = reinterpret_cast<const u8*>(p.at.weight) + (u64)channel * TAPS * 4;
#pragma unroll
            for (u32 i = 0; i < V * TAPS; i += 4) {
                const u32x4 v = ld_global_v4(at + i * 4);
                c.weights[i] = bits_to_f32(v.x), c.weights[i + 1] = bits_to_f32(v.y);
                c.weights[i + 2] = bits_to_f32(v.z), c.weights[i + 3] = bits_to_f32(v.w);
            }
        } else {
#pragma unroll
            for (u32 i = 0; i < V * TAPS; i++) {
                const u32 tap = i % TAPS;
                const u64 at = (u64)(channel + i / TAPS) * width + tap - absent;
                c.weights[i] = tap < absent ? 0.0f : bits_to_f32(word_at(p.at.weight, at));
            }
        }
        if (p.at.bias == 0) return;
#pragma unroll
        for (u32 i = 0; i < V; i++) c.bias[i] = bits_to_f32(word_at(p.at.bias, channel + i));
    }

    // The result of a token, whose input enters the window.
    QG_DEVICE void step(Convolution& c, const ShortConvParams& p, u32 channel, u64 token, const Row& input) {
        float sums[V];
#pragma unroll
        for (u32 i = 0; i < V; i++) {
            const float u = Row::number(input, i);
            float sum = c.bias[i];
#pragma unroll
            for (u32 j = 0; j < TAPS - 1; j++) sum = fma_f32(c.weights[i * TAPS + j], c.window[j][i], sum);
            sums[i] = fma_f32(c.weights[i * TAPS + TAPS - 1], u, sum);
#pragma unroll
            for (u32 j = 0; j + 1 < TAPS - 1; j++) c.window[j][i] = j + p.shape.width < TAPS ? 0.0f : c.window[j + 1][i];
            c.window[TAPS - 2][i] = u;
        }
        if (p.shape.flags & QG_FLAG_SILU)
#pragma unroll
            for (u32 i = 0; i < V; i++) sums[i] *= sigmoid(sums[i]);
        if (p.at.output_gate) {
            Row gate;
            Row::load(gate, p.at.output_gate, token * p.at.output_gate_row + channel);
#pragma unroll
            for (u32 i = 0; i < V; i++) sums[i] *= Row::number(gate, i);
        }
        Row::store(Row::of(sums), p.at.d, token * p.at.d_row + channel);
    }

    // The window before token `from` of a sequence.
    QG_DEVICE void load_window(Convolution& c, const ShortConvParams& p, const Lane<V>& lane, u32 begin, u32 from,
                               const Slot& slot) {
        const u32 absent = TAPS - p.shape.width;
#pragma unroll
        for (u32 j = 0; j < TAPS - 1; j++) {
            Row before = {};
            if (j >= absent) {
                if (from == 0)
                    Lane<V>::load_state(before, p, slot, j - absent);
                else
                    Lane<V>::load_input(lane, before, p, (u64)begin + from + j - (TAPS - 1));
            }
#pragma unroll
            for (u32 i = 0; i < V; i++) c.window[j][i] = Row::number(before, i);
        }
    }

    // Tokens `from` to `to` of a sequence.
    QG_DEVICE void run(Convolution& c, const ShortConvParams& p, const Lane<V>& lane, u32 begin, u32 from, u32 to) {
#pragma unroll 1
        for (u32 i = from; i < to; i += AT_ONCE) {
            Row inputs[AT_ONCE];
#pragma unroll
            for (u32 k = 0; k < AT_ONCE; k++)
                if (i + k < to) Lane<V>::load_input(lane, inputs[k], p, (u64)begin + i + k);
#pragma unroll
            for (u32 k = 0; k < AT_ONCE; k++)
                if (i + k < to) step(c, p, lane.channel, (u64)begin + i + k, inputs[k]);
        }
    }
};

template <u32 V>
QG_DEVICE void convolve(const ShortConvParams& p) {
    const Lane<V> lane = {(cta_index().y * QG_THREADS + thread_index()) * V};
    const bool is_any = lane.channel < p.shape.channels;
    Convolution<V> c = {};
    if (is_any) Convolution<V>::load_weights(c, p, lane.channel);
    griddepcontrol_wait();
    const u32 first = cta_index().x * (u32)p.at.tile_tokens, window = p.shape.width - 1;
    const u32 end = least(first + (u32)p.at.tile_tokens, p.shape.tokens);
    u32 sequence = sequence_at(p, first);
    if (!is_any) return;
    for (; sequence < p.shape.sequences; sequence++) {
        const Span span = span_of(p, sequence);
        if (span.token >= end) return;
        // The CTA of the first token has all that need the old state.
        const bool is_first = span.token >= first;
        const u32 begun = first - span.token, room = end - span.token;
        const u32 from = is_first ? 0 : begun > window ? begun : window;
        const u32 to = least(is_first && room < window ? window : room, span.count);
        if (from >= to) continue;
        Slot slot = {0, false};
        if (is_first) slot = Slot::of(p, sequence, lane.channel);
        Convolution<V>::load_window(c, p, lane, span.token, from, slot);
        Convolution<V>::run(c, p, lane, span.token, from, to);
        if (!slot.is_present) continue;
        const u32 entering = p.at.advance ? least(word_at(p.at.advance, sequence), span.count) : span.count;
        Lane<V>::store_state(lane, p, span.token, entering, slot);
    }
}

extern "C" __global__ void __launch_bounds__(QG_THREADS) qg_short_conv(const __grid_constant__ ShortConvParams p) {
    griddepcontrol_launch_dependents();
    if (p.shape.flags & QG_FLAG_ALIGNED16)
        convolve<8>(p);
    else
        convolve<1>(p);
}
