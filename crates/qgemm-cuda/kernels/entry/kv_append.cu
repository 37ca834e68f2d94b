// Head norms, rotary embedding, Hadamard rotation and KV-cache append:
// changes queries in place, writes keys and values to the cache. A token
// has one or several CTAs; each computes the angles once. A group of lanes
// has a head, eight features a lane, and processes several heads
// with the same angles. With aligned operands, and rotary pairs
// that are adjacent or whole vectors apart, a lane has all its
// heads in flight; otherwise it takes one head at a time.
#include "atoms/bits.cuh"
#include "atoms/narrow_store.cuh"
#include "atoms/opaque_register.cuh"
#include "atoms/rounded.cuh"
#include "attention/hadamard.cuh"
#include "attention/head_norm.cuh"
#include "attention/numbers.cuh"
#include "attention/problem.cuh"
#include "attention/rotary.cuh"
#include "mainloop/e4m3_code.cuh"

struct KvAppendParams {
    AttentionParams attention;
    KvAppendPointers at;
};

// Heads of a lane in flight, at most.
constexpr u32 MOST_HEADS = 6;
constexpr u32 X_BYTES = QG_X == DTYPE_F32 ? 4 : 2;
constexpr u32 X_WORDS = X_BYTES * 2;
// CTAs per SM that fit without register spills.
constexpr u32 LEAST_CTAS = QG_X == DTYPE_F32 || QG_VARIANT == 70 ? 4 : 6;
constexpr u32 NO_SEQUENCE = ~0u;
struct SharedStorage {
    Turns turns;
    Gammas gammas;
};
static_assert(sizeof(SharedStorage) == QG_SHARED_BYTES, "the host computes another size");
static_assert(QG_THREADS >= 128, "threads have a pair each");

// The last sequence that begins at or before `token`.
// Offsets ascend; a warp searches 32-ary. Warp-collective.
QG_DEVICE u32 sequence_at(const AttentionParams& p, u32 token) {
    if (!(p.shape.flags & QG_FLAG_Q_OFFSETS)) return token / p.shape.most_queries;
    const u32 lane = thread_index() % 32;
    u32 first = 0, count = p.shape.sequences;
    do {
        const u32 step = (count + 31) / 32, at = lane * step;
        const u32 begun = popc(ballot(at < count && index_at(p.at.q_offsets, first + at) <= token));
        if (begun == 0) return NO_SEQUENCE;
        first += (begun - 1) * step;
        count = least(step, count - (begun - 1) * step);
    } while (count > 1);
    return first;
}

// Eight stored numbers of Q, K or V. Loads are
// coherent: queries are overwritten in place.
struct Source {
    u32 words[X_WORDS];

    QG_DEVICE Source load(const u8* at, bool aligned) {
        Source source;
        if (aligned) {
#pragma unroll
            for (u32 i = 0; i < X_WORDS; i += 4) {
                const u32x4 v = ld_global_v4(at + i * 4);
                source.words[i] = v.x, source.words[i + 1] = v.y, source.words[i + 2] = v.z, source.words[i + 3] = v.w;
            }
            return source;
        }
#pragma unroll
        for (u32 i = 0; i < X_WORDS; i++) {
            if constexpr (X_BYTES == 4)
                source.words[i] = ld_global_u32(at + i * 4);
            else
                source.words[i] = ld_global_cached_u16(at + i * 4) | ld_global_cached_u16(at + i * 4 + 2) << 16;
        }
        return source;
    }

    QG_DEVICE float number(const Source& source, u32 i) {
        if constexpr (X_BYTES == 4) return bits_to_f32(source.words[i % X_WORDS]);
        const u32 half = source.words[i / 2] >> (16 * (i % 2)) & 0xffffu;
        return QG_X == DTYPE_F16 ? f16_to_f32(half) : bf16_to_f32(half);
    }

    QG_DEVICE float load_one(const u8* at) {
        if constexpr (X_BYTES == 4) return bits_to_f32(ld_global_u32(at));
        const u32 half = ld_global_cached_u16(at);
        return QG_X == DTYPE_F16 ? f16_to_f32(half) : bf16_to_f32(half);
    }
};

// Stores eight numbers in DTYPE, an element type or E4M3.
template <u32 DTYPE>
QG_DEVICE void store_eight(u8* to, bool aligned, const float (&x)[8]) {
    if constexpr (DTYPE == DTYPE_F32) {
        if (aligned) {
            st_global_v4(to, {f32_to_bits(x[0]), f32_to_bits(x[1]), f32_to_bits(x[2]), f32_to_bits(x[3])});
            st_global_v4(to + 16, {f32_to_bits(x[4]), f32_to_bits(x[5]), f32_to_bits(x[6]), f32_to_bits(x[7])});
            return;
        }
#pragma unroll
        for (u32 i = 0; i < 8; i++) st_global_u32(to + i * 4, f32_to_bits(x[i]));
    } else if constexpr (DTYPE == KV_E4M3) {
        u32 pairs[4];
#pragma unroll
        for (u32 i = 0; i < 4; i++) pairs[i] = f32_to_e4m3x2(x[2 * i], x[2 * i + 1]);
        if (aligned) {
            st_global_v2(to, {pairs[0] | pairs[1] << 16, pairs[2] | pairs[3] << 16});
            return;
        }
#pragma unroll
        for (u32 i = 0; i < 8; i++) st_global_u8(to + i, pairs[i / 2] >> (8 * (i % 2)) & 0xffu);
    } else {
        u32 halves[8];
#pragma unroll
        for (u32 i = 0; i < 8; i++) halves[i] = DTYPE == DTYPE_F16 ? f32_to_f16(x[i]) : f32_to_bf16(x[i]);
        if (aligned) {
            st_global_v4(to, {halves[0] | halves[1] << 16, halves[2] | halves[3] << 16, halves[4] | halves[5] << 16,
                              halves[6] | halves[7] << 16});
            return;
        }
#pragma unroll
        for (u32 i = 0; i < 8; i++) st_global_u16(to + i * 2, halves[i]);
    }
}

// Quantization of a block, which four lanes share:
// multiplier of the numbers, and the scale to store.
struct BlockScale {
    float inverse, scale;

    // Warp-collective.
    QG_DEVICE BlockScale of(const float (&x)[8]) {
        float high = 0.0f, low = 0.0f;
#pragma unroll
        for (u32 i = 0; i < 8; i++) {
            high = x[i] > high ? x[i] : high;
            low = x[i] < low ? x[i] : low;
        }
#pragma unroll
        for (u32 mask = 1; mask < KV_BLOCK / 8; mask *= 2) {
            const float other_high = shfl_xor(high, mask), other_low = shfl_xor(low, mask);
            high = other_high > high ? other_high : high;
            low = other_low < low ? other_low : low;
        }
        const float magnitude = high > -low ? high : -low;
        if (magnitude == 0.0f) return {0.0f, 0.0f};
        if constexpr (QG_KV == KV_Q8_0) return {127.0f * rcp_rn_f32(magnitude), magnitude * (1.0f / 127.0f)};
        // The number of largest magnitude becomes -8.
        const float furthest = high > -low ? high : low;
        return {-8.0f * rcp_rn_f32(furthest), furthest * -0.125f};
    }
};

// Quantizes and stores eight numbers of a block. Each
// step is rounded separately, as on the CPU and in WGSL.
QG_DEVICE void store_codes(u8* to, bool aligned, const float (&x)[8], float inverse) {
    if constexpr (QG_KV == KV_Q8_0) {
        // Adding 1.5 · 2^23 rounds to an integer
        // and leaves it in the low byte of the sum.
        u32 words[2] = {0, 0};
#pragma unroll
        for (u32 i = 0; i < 8; i++) words[i / 4] |= (f32_to_bits(mul_rn_f32(x[i], inverse) + 12582912.0f) & 0xffu) << (i % 4 * 8);
        if (aligned) {
            st_global_v2(to, {words[0], words[1]});
            return;
        }
#pragma unroll
        for (u32 i = 0; i < 8; i++) st_global_u8(to + i, words[i / 4] >> (i % 4 * 8) & 0xffu);
    } else {
        u32 word = 0;
#pragma unroll
        for (u32 i = 0; i < 8; i++) word |= least((u32)(mul_rn_f32(x[i], inverse) + 8.5f), 15u) << (i * 4);
        if (aligned) {
            st_global_u32(to, word);
            return;
        }
#pragma unroll
        for (u32 i = 0; i < 4; i++) st_global_u8(to + i, word >> (i * 8) & 0xffu);
    }
}

// A head of a token. Head numbers count
// queries, then keys, then values.
struct Head {
    const u8* from;
    u32 index, columns;
    bool is_query, is_value, aligned;

    QG_DEVICE Head at(const KvAppendParams& p, u32 token, u32 head) {
        const AttentionShape& shape = p.attention.shape;
        Head h = {nullptr, head, shape.qk_dim, head < shape.heads, false, p.at.new_aligned != 0};
        if (h.is_query) {
            const u64 element = token * p.attention.at.q_token + head * p.attention.at.q_head;
            h.from = reinterpret_cast<const u8*>(p.attention.at.q) + element * X_BYTES;
            h.aligned = shape.flags & QG_FLAG_Q_ALIGNED;
            return h;
        }
        h.index -= shape.heads;
        if (h.index < shape.kv_heads) {
            const u64 element = token * p.at.new_k_token + h.index * p.at.new_k_head;
            h.from = reinterpret_cast<const u8*>(p.at.new_k) + element * X_BYTES;
            return h;
        }
        h.index -= shape.kv_heads;
        h.is_value = true;
        h.columns = shape.v_dim;
        h.from = reinterpret_cast<const u8*>(p.at.new_v) + (token * p.at.new_v_token + h.index * p.at.new_v_head) * X_BYTES;
        return h;
    }
};

// Writes eight numbers of a head to
// the K or V cache, from `element` on.
QG_DEVICE void store_cached(const AttentionParams& p, bool is_value, bool aligned, u32 head, u64 element, float (&x)[8],
                            const BlockScale& scale) {
    u8* to = reinterpret_cast<u8*>(is_value ? p.at.v : p.at.k) + Eight<QG_KV>::offset_of(element);
    if constexpr (has_scales(QG_KV)) {
        store_codes(to, aligned, x, scale.inverse);
        u8* scales = reinterpret_cast<u8*>(is_value ? p.at.v_scales : p.at.k_scales);
        if (element % KV_BLOCK == 0) st_global_u16(scales + element / KV_BLOCK * 2, f32_to_f16(scale.scale));
        return;
    }
    if constexpr (QG_KV == KV_E4M3) {
        const u64 factors = is_value ? p.at.v_factors : p.at.k_factors;
        const float inverse = rcp_rn_f32(bits_to_f32(index_at(factors, head)));
#pragma unroll
        for (u32 i = 0; i < 8; i++) x[i] = mul_rn_f32(x[i], inverse);
    }
    if constexpr (!has_scales(QG_KV)) store_eight<QG_KV>(to, aligned, x);
}

// A token, and the cache slot of its key and value.
struct Token {
    u32 index, position;
    KeyAddress place;
    // Whether the token is appended.
    bool is_any;

    QG_DEVICE Token of(const KvAppendParams& p, u32 index) {
        Token token = {index, 0, {0, 0, false}, false};
        const AttentionShape& shape = p.attention.shape;
        const u32 sequence = sequence_at(p.attention, index);
        if (sequence == NO_SEQUENCE || sequence >= shape.sequences) return token;
        const Sequence s = sequence_of(p.attention, sequence);
        const u32 query = index - s.token;
        // Slot of the key: keys + query − queries.
        // Tokens before slot 0 are skipped.
        if (query >= s.queries || s.keys + query < s.queries) return token;
        const u32 key = s.keys + query - s.queries;
        token.position = p.at.positions ? index_at(p.at.positions, index) : key;
        if (p.at.cos && token.position >= p.at.table_positions) return token;
        token.place = address_of_key(p.attention, s, key);
        token.is_any = true;
        return token;
    }
};

// Heads that a lane processes (from `first`
// in steps of `step`), and its first feature.
struct LaneHeads {
    u32 first, step, count, column;
};

// Address of a lane's eight features in
// head 0, and the stride between heads.
struct HeadRow {
    u64 from;
    u32 step;

    // Opaque registers: the compiler would
    // repeat the multiplication for every head.
    QG_DEVICE HeadRow of(u64 from, u32 step) {
        return {(u64)opaque_register((u32)(from >> 32)) << 32 | opaque_register((u32)from), step};
    }
    QG_DEVICE u64 at(const HeadRow& row, u32 head) {
        return row.from + (u64)head * row.step;
    }
};

// Whether the fast path applies: no Hadamard
// rotation, whose sums need registers, all rows
// aligned, head strides are below 2^30 elements,
// and partners of eight features are in one lane.
QG_DEVICE bool are_aligned(const KvAppendParams& p) {
    const AttentionShape& shape = p.attention.shape;
    const AttentionPointers& cache = p.attention.at;
    const bool q_aligned = shape.heads == 0 || (shape.flags & QG_FLAG_Q_ALIGNED);
    const u64 steps = cache.q_head | p.at.new_k_head | p.at.new_v_head | cache.k_head | cache.v_head;
    const bool is_plain = p.at.k_lanes == 0 && p.at.v_lanes == 0;
    return is_plain && q_aligned && p.at.new_aligned && (shape.flags & QG_FLAG_KV_ALIGNED) && steps >> 30 == 0 &&
           p.at.rotary_dim % (p.at.interleaved ? 8 : 16) == 0;
}

// Fast path: all heads of a lane in flight (queries, keys, values).
struct AlignedHeads {
    LaneHeads own;
    Source sources[MOST_HEADS];
    HeadRow queries;

    // In bytes.
    QG_DEVICE HeadRow row_of(u64 operand, u64 element, u64 step) {
        return HeadRow::of(operand + element * X_BYTES, (u32)step * X_BYTES);
    }

    QG_DEVICE AlignedHeads load(const KvAppendParams& p, u32 token, const LaneHeads& own) {
        const AttentionShape& shape = p.attention.shape;
        const AttentionPointers& at = p.attention.at;
        AlignedHeads heads = {own, {}, row_of(at.q, token * at.q_token + own.column, at.q_head)};
        const HeadRow keys = row_of(p.at.new_k, token * p.at.new_k_token + own.column, p.at.new_k_head);
        const HeadRow values = row_of(p.at.new_v, token * p.at.new_v_token + own.column, p.at.new_v_head);
        const u32 first_value = shape.heads + shape.kv_heads;
#pragma unroll
        for (u32 i = 0; i < MOST_HEADS; i++) {
            const u32 head = own.first + i * own.step;
            const bool is_query = head < shape.heads, is_value = head >= first_value;
            if (i >= own.count || head >= first_value + shape.kv_heads || own.column >= (is_value ? shape.v_dim : shape.qk_dim)) continue;
            const HeadRow row = {is_query ? heads.queries.from : is_value ? values.from : keys.from,
                                 is_query ? heads.queries.step : is_value ? values.step : keys.step};
            const u32 index = head - (is_query ? 0 : is_value ? first_value : shape.heads);
            heads.sources[i] = Source::load(reinterpret_cast<const u8*>(HeadRow::at(row, index)), true);
        }
        return heads;
    }

    QG_DEVICE void append(const AlignedHeads& heads, const KvAppendParams& p, const Token& token, const SharedStorage& shared) {
        const AttentionShape& shape = p.attention.shape;
        const AttentionPointers& at = p.attention.at;
        const LaneHeads& own = heads.own;
        const u32 half = p.at.rotary_dim / 2, lane = thread_index() % 32, first_value = shape.heads + shape.kv_heads;
        const bool is_rotated = own.column < p.at.rotary_dim;
        // The partner features are in another lane of the head.
        const u32 partner_lane = lane + (own.column < half ? half / 8 : 0u - half / 8);
        Angles angles;
        if (is_rotated) angles = Angles::of(shared.turns, p.at, own.column, !p.at.interleaved);
        // In elements.
        const HeadRow keys = HeadRow::of(token.place.page * at.k_page + token.place.row * at.k_token + own.column, (u32)at.k_head);
        const HeadRow values = HeadRow::of(token.place.page * at.v_page + token.place.row * at.v_token + own.column, (u32)at.v_head);
#pragma unroll
        for (u32 i = 0; i < MOST_HEADS; i++) {
            // Uniform for the warp, which shuffles below.
            if (i >= own.count) break;
            const u32 head = own.first + i * own.step;
            const bool is_query = head < shape.heads, is_value = head >= first_value;
            const bool is_own = head < first_value + shape.kv_heads && own.column < (is_value ? shape.v_dim : shape.qk_dim);
            const Source& source = heads.sources[i];
            float x[8];
#pragma unroll
            for (u32 j = 0; j < 8; j++) x[j] = Source::number(source, j);
            if (p.at.is_normed) normalize_head(x, p.at, shared.gammas, own.column, is_query, !is_value);
            float partner[8];
            if (p.at.interleaved) {
#pragma unroll
                for (u32 j = 0; j < 8; j++) partner[j] = x[j ^ 1u];
            } else if (p.at.is_normed) {
#pragma unroll
                for (u32 j = 0; j < 8; j++) partner[j] = bits_to_f32(shfl_idx_u32(f32_to_bits(x[j]), partner_lane));
            } else {
                Source other;
#pragma unroll
                for (u32 j = 0; j < X_WORDS; j++) other.words[j] = shfl_idx_u32(source.words[j], partner_lane);
#pragma unroll
                for (u32 j = 0; j < 8; j++) partner[j] = Source::number(other, j);
            }
            if (is_rotated && !is_value) {
#pragma unroll
                for (u32 j = 0; j < 8; j++) x[j] = fma_f32(x[j], angles.own[j], partner[j] * angles.partner[j]);
            }
            BlockScale scale = {};
            if constexpr (has_scales(QG_KV)) scale = BlockScale::of(x);
            if (!is_own) continue;
            const u32 index = head - (is_query ? 0 : is_value ? first_value : shape.heads);
            if (is_query)
                store_eight<QG_X>(reinterpret_cast<u8*>(HeadRow::at(heads.queries, index)), true, x);
            else if (token.place.is_present)
                store_cached(p.attention, is_value, true, index, is_value ? HeadRow::at(values, index) : HeadRow::at(keys, index), x, scale);
        }
    }
};

// General path: one head at a time, any alignment,
// Hadamard rotation.
QG_DEVICE void append_any(const KvAppendParams& p, const Token& token, const SharedStorage& shared, const LaneHeads& own) {
    const AttentionParams& attention = p.attention;
    const u32 all = attention.shape.heads + 2 * attention.shape.kv_heads, half = p.at.rotary_dim / 2;
    const u32 most_lanes = most(p.at.k_lanes, p.at.v_lanes);
    const Angles angles = Angles::of(shared.turns, p.at, own.column, false);
    // Partners are found once a head is normalized or rotated.
    const bool are_late = p.at.turns_last || p.at.is_normed;
#pragma unroll 1
    for (u32 i = 0; i < own.count; i++) {
        const u32 item = own.first + i * own.step;
        const bool is_present = item < all;
        const Head head = Head::at(p, token.index, is_present ? item : 0);
        const bool is_own = is_present && own.column < head.columns;
        float x[8] = {}, partner[8] = {};
        if (is_own) {
            const Source source = Source::load(head.from + own.column * X_BYTES, head.aligned);
#pragma unroll
            for (u32 j = 0; j < 8; j++) x[j] = Source::number(source, j);
        }
#pragma unroll
        for (u32 j = 0; j < 8; j++) {
            const u32 feature = own.column + j;
            if (!is_own || head.is_value || are_late || feature >= p.at.rotary_dim) continue;
            if (p.at.interleaved)
                partner[j] = x[j ^ 1u];
            else
                partner[j] = Source::load_one(head.from + (feature < half ? feature + half : feature - half) * X_BYTES);
        }
        // Queries are overwritten in place: all lanes must have read first.
        warp_barrier();
        const auto turn_own = [&] {
            if (head.is_value) return;
#pragma unroll
            for (u32 j = 0; j < 8; j++)
                if (own.column + j < p.at.rotary_dim) x[j] = fma_f32(x[j], angles.own[j], partner[j] * angles.partner[j]);
        };
        if (p.at.is_normed) normalize_head(x, p.at, shared.gammas, own.column, head.is_query, !head.is_value);
        if (!p.at.turns_last) {
            if (p.at.is_normed) partners_of(x, p.at, own.column, partner);
            turn_own();
        }
        if (most_lanes != 0) hadamard(x, head.is_value ? p.at.v_lanes : p.at.k_lanes, most_lanes, head.is_value ? p.at.v_scale : p.at.k_scale);
        if (p.at.turns_last) {
            partners_of(x, p.at, own.column, partner);
            turn_own();
        }
        BlockScale scale = {};
        if constexpr (has_scales(QG_KV)) scale = BlockScale::of(x);
        if (!is_own) continue;
        if (head.is_query) {
            store_eight<QG_X>(const_cast<u8*>(head.from) + own.column * X_BYTES, head.aligned, x);
        } else if (token.place.is_present) {
            const AttentionPointers& cache = attention.at;
            const u64 element = head.is_value ? token.place.page * cache.v_page + token.place.row * cache.v_token + head.index * cache.v_head
                                              : token.place.page * cache.k_page + token.place.row * cache.k_token + head.index * cache.k_head;
            store_cached(attention, head.is_value, attention.shape.flags & QG_FLAG_KV_ALIGNED, head.index, element + own.column, x, scale);
        }
    }
}

extern "C" __global__ void __launch_bounds__(QG_THREADS, LEAST_CTAS) qg_kv_append(const __grid_constant__ KvAppendParams p) {
    SharedStorage& shared = *reinterpret_cast<SharedStorage*>(dynamic_shared());
    u32 index = cta_index().x, split = 0;
    if (p.at.splits > 1) index = cta_index().x / p.at.splits, split = cta_index().x % p.at.splits;
    const u32 lanes_shift = popc(p.at.head_lanes - 1), groups = QG_THREADS >> lanes_shift, group = thread_index() >> lanes_shift;
    const LaneHeads own = {split * p.at.lane_heads * groups + group, groups, p.at.lane_heads,
                           (thread_index() & (p.at.head_lanes - 1)) * 8};
    // Ready indices and angles are looked up before the wait.
    // The attention behind this launch starts as early.
    const bool keys_ready = p.attention.shape.flags & QG_FLAG_KEYS_READY;
    if (!keys_ready) griddepcontrol_wait();
    griddepcontrol_launch_dependents();
    const u64 frequency = frequency_of_thread(p.at);
    const Token token = Token::of(p, index);
    if (token.is_any) write_turns(p.at, token.position, frequency, shared.turns);
    if (p.at.is_normed) write_gammas(p.at, p.attention.shape.qk_dim, shared.gammas);
    if (keys_ready) griddepcontrol_wait();
    if (!token.is_any) return;
    const bool is_aligned = are_aligned(p);
    AlignedHeads heads;
    if (is_aligned) heads = AlignedHeads::load(p, index, own);
    cta_barrier();
    if (is_aligned)
        AlignedHeads::append(heads, p, token, shared);
    else
        append_any(p, token, shared, own);
}
