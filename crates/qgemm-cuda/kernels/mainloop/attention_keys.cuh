// Attention: sequences, KV cache addressing, visible key
// ranges. Indices are clamped: no content of offsets,
// lengths or tables makes an access go out of bounds.
#pragma once
#include "atoms/e4m3.cuh"
#include "atoms/exp2.cuh"
#include "atoms/float.cuh"
#include "atoms/launch.cuh"
#include "atoms/memory.cuh"
#include "atoms/sync.cuh"
#include "atoms/warp.cuh"
#include "generated/abi.cuh"

// Kernel parameter of every attention kernel.
struct AttentionParams {
    AttentionShape shape;
    AttentionPointers at;
};

// KV formats of the prelude beyond the element types (DTYPE_*).
constexpr u32 KV_E4M3 = 3, KV_Q8_0 = 4, KV_Q4_0 = 5;
// Features that share a scale in Q8_0 and Q4_0.
constexpr u32 KV_BLOCK = 32;
QG_DEVICE constexpr bool has_scales(u32 format) {
    return format == KV_Q8_0 || format == KV_Q4_0;
}

QG_DEVICE float minus_infinity() {
    return bits_to_f32(0xff800000u);
}
constexpr float LN_2 = 0.693147181f;

struct Sequence {
    u32 index;
    // First query token, and number of queries.
    u32 token, queries;
    // First row of K for packed sequences
    // (kv_offsets), and number of keys.
    u32 row, keys;
};

QG_DEVICE u32 least(u32 a, u32 b) {
    return a < b ? a : b;
}
QG_DEVICE u32 most(u32 a, u32 b) {
    return a > b ? a : b;
}
// max(a − b, 0) for unsigned numbers.
QG_DEVICE u32 beyond(u32 a, u32 b) {
    return a > b ? a - b : 0;
}

QG_DEVICE u32 index_at(u64 address, u64 i) {
    return ld_global_u32(reinterpret_cast<const u8*>(address) + i * 4);
}

QG_DEVICE Sequence sequence_of(const AttentionParams& p, u32 index) {
    const AttentionShape& shape = p.shape;
    Sequence s = {index, index * shape.most_queries, shape.most_queries, 0, shape.most_keys};
    if (shape.flags & QG_FLAG_Q_OFFSETS) {
        s.token = least(index_at(p.at.q_offsets, index), shape.tokens);
        s.queries = beyond(least(index_at(p.at.q_offsets, index + 1), shape.tokens), s.token);
    }
    if (shape.flags & QG_FLAG_KV_OFFSETS) {
        s.row = least(index_at(p.at.kv_offsets, index), shape.page_size);
        s.keys = beyond(least(index_at(p.at.kv_offsets, index + 1), shape.page_size), s.row);
    } else if (shape.flags & QG_FLAG_KV_LENGTHS) {
        s.keys = index_at(p.at.kv_lengths, index);
    }
    s.queries = least(s.queries, shape.most_queries);
    s.keys = least(s.keys, shape.most_keys);
    return s;
}

// Half-open range of keys.
struct KeyRange {
    u32 first, end;
};

// Keys that a query attends to: causal range and sliding window.
QG_DEVICE KeyRange visible_keys(const AttentionParams& p, const Sequence& s, u32 query) {
    // One past the query's own position,
    // which is aligned to the last key.
    const u32 end = beyond(s.keys + query + 1, s.queries);
    const u32 last = p.shape.flags & QG_FLAG_CAUSAL ? least(end, s.keys) : s.keys;
    return {least(beyond(end, p.shape.window), last), last};
}

// Union of the keys visible to the queries
// `first ..= last`. Windows move with the query.
QG_DEVICE KeyRange visible_keys_of(const AttentionParams& p, const Sequence& s, u32 first, u32 last) {
    return {visible_keys(p, s, first).first, visible_keys(p, s, last).end};
}

// Page and row of a key in the KV cache.
struct KeyAddress {
    u32 page, row;
    // Whether the block table has a valid page for the key.
    bool is_present;
};

QG_DEVICE KeyAddress address_of_key(const AttentionParams& p, const Sequence& s, u32 key) {
    if (p.shape.table_width == 0) {
        const bool by_offsets = p.shape.flags & QG_FLAG_KV_OFFSETS;
        return {by_offsets ? 0 : s.index, s.row + key, true};
    }
    u32 place, row;
    if (p.at.page_shift < 32) {
        place = key >> p.at.page_shift;
        row = key & (p.shape.page_size - 1);
    } else {
        place = key / p.shape.page_size;
        row = key - place * p.shape.page_size;
    }
    const u32 page = index_at(p.at.block_table, (u64)s.index * p.shape.table_width + place);
    return {page, row, page < p.shape.pages};
}

// Eight adjacent stored numbers of a format, without scales.
template <u32 DTYPE>
struct Eight {
    static constexpr u32 BITS = DTYPE == DTYPE_F32 ? 32 : DTYPE < KV_E4M3 ? 16 : DTYPE == KV_Q4_0 ? 4 : 8;
    static constexpr u32 WORDS = BITS / 4;
    u32 words[WORDS];

    // Byte offset of an element.
    QG_DEVICE u64 offset_of(u64 element) {
        return element * BITS / 8;
    }

    QG_DEVICE Eight zeros() {
        Eight eight;
#pragma unroll
        for (u32 i = 0; i < WORDS; i++) eight.words[i] = 0;
        return eight;
    }

    // `aligned`: the address is a multiple of the size of
    // eight numbers, or of 16 bytes if this is smaller.
    QG_DEVICE Eight load(const u8* address, bool aligned) {
        Eight eight;
        if (aligned) {
            if constexpr (WORDS == 1) {
                eight.words[0] = ld_global_stream_u32(address);
            } else if constexpr (WORDS == 2) {
                const u32x2 v = ld_global_stream_v2(address);
                eight.words[0] = v.x, eight.words[1] = v.y;
            } else {
#pragma unroll
                for (u32 i = 0; i < WORDS; i += 4) {
                    const u32x4 v = ld_global_stream_v4(address + i * 4);
                    eight.words[i] = v.x, eight.words[i + 1] = v.y, eight.words[i + 2] = v.z, eight.words[i + 3] = v.w;
                }
            }
            return eight;
        }
#pragma unroll
        for (u32 i = 0; i < WORDS; i++) {
            if constexpr (BITS == 32) {
                eight.words[i] = ld_global_stream_u32(address + i * 4);
            } else if constexpr (BITS == 16) {
                eight.words[i] = ld_global_u16(address + i * 4) | ld_global_u16(address + i * 4 + 2) << 16;
            } else {
                eight.words[i] = 0;
#pragma unroll
                for (u32 j = 0; j < 4; j++) eight.words[i] |= ld_global_u8(address + i * 4 + j) << (8 * j);
            }
        }
        return eight;
    }

    QG_DEVICE float number(const Eight& eight, u32 i) {
        if constexpr (DTYPE == DTYPE_F32) return bits_to_f32(eight.words[i]);
        if constexpr (DTYPE == DTYPE_F16) return f16_to_f32(eight.words[i / 2] >> (i % 2 * 16));
        if constexpr (DTYPE == DTYPE_BF16) {
            const u32 word = eight.words[i / 2];
            return bits_to_f32(i % 2 ? word & 0xffff0000u : word << 16);
        }
        // Shift the byte to the top, then
        // arithmetically back: sign extension.
        if constexpr (DTYPE == KV_Q8_0) return (float)((i32)(eight.words[i / 4] << (24 - i % 4 * 8)) >> 24);
        if constexpr (DTYPE == KV_Q4_0) return (float)(i32)(eight.words[0] >> (i * 4) & 15u) - 8.0f;
        if constexpr (DTYPE == KV_E4M3) return e4m3_to_f32_or_nan(eight.words[i / 4] >> (i % 4 * 8) & 0xffu);
    }
};

// Loads eight numbers of Q as f32.
// The type of Q is a run-time value.
QG_DEVICE void load_query(const AttentionParams& p, u64 element, float (&q)[8]) {
    const u8* base = reinterpret_cast<const u8*>(p.at.q);
    const bool aligned = p.shape.flags & QG_FLAG_Q_ALIGNED;
    if (p.shape.dtype == DTYPE_F32) {
        const auto eight = Eight<DTYPE_F32>::load(base + element * 4, aligned);
#pragma unroll
        for (u32 i = 0; i < 8; i++) q[i] = Eight<DTYPE_F32>::number(eight, i);
    } else if (p.shape.dtype == DTYPE_F16) {
        const auto eight = Eight<DTYPE_F16>::load(base + element * 2, aligned);
#pragma unroll
        for (u32 i = 0; i < 8; i++) q[i] = Eight<DTYPE_F16>::number(eight, i);
    } else {
        const auto eight = Eight<DTYPE_BF16>::load(base + element * 2, aligned);
#pragma unroll
        for (u32 i = 0; i < 8; i++) q[i] = Eight<DTYPE_BF16>::number(eight, i);
    }
}

// Rounds eight results to the type of
// D and stores them from `element` on.
QG_DEVICE void store_results(const AttentionParams& p, u64 element, const float (&d)[8]) {
    u8* base = reinterpret_cast<u8*>(p.at.d);
    const bool aligned = p.shape.flags & QG_FLAG_D_ALIGNED;
    u32 words[8];
    if (p.shape.dtype == DTYPE_F32) {
        u8* to = base + element * 4;
#pragma unroll
        for (u32 i = 0; i < 8; i++) words[i] = f32_to_bits(d[i]);
        if (aligned) {
            st_global_v4(to, {words[0], words[1], words[2], words[3]});
            st_global_v4(to + 16, {words[4], words[5], words[6], words[7]});
            return;
        }
#pragma unroll
        for (u32 i = 0; i < 8; i++) st_global_u32(to + i * 4, words[i]);
        return;
    }
    u8* to = base + element * 2;
#pragma unroll
    for (u32 i = 0; i < 8; i++) words[i] = p.shape.dtype == DTYPE_F16 ? f32_to_f16(d[i]) : f32_to_bf16(d[i]);
    if (aligned) {
        st_global_v4(to, {words[0] | words[1] << 16, words[2] | words[3] << 16, words[4] | words[5] << 16,
                          words[6] | words[7] << 16});
        return;
    }
#pragma unroll
    for (u32 i = 0; i < 8; i++) st_global_u16(to + i * 2, words[i]);
}

// Soft cap of a scaled score, which is a base-2 exponent.
QG_DEVICE float bounded(const AttentionParams& p, float product) {
    if (!(p.shape.flags & QG_FLAG_SOFT_CAP)) return product;
    // tanh |x| = (1 - e) / (1 + e), with e = exp(-2 |x|).
    const float magnitude = product < 0.0f ? -product : product;
    const float e = ex2_approx(magnitude * -2.88539008f);
    const float tanh = (1.0f - e) / (1.0f + e);
    return (product < 0.0f ? -tanh : tanh) * p.shape.soft_cap;
}

// Softmax scale times the dequantization factor of the KV head.
QG_DEVICE float key_factor(const AttentionParams& p, u32 kv_head) {
    const float own = p.at.k_factors ? bits_to_f32(index_at(p.at.k_factors, kv_head)) : 1.0f;
    return p.shape.factor * own;
}
QG_DEVICE float value_factor(const AttentionParams& p, u32 kv_head) {
    return p.at.v_factors ? bits_to_f32(index_at(p.at.v_factors, kv_head)) : 1.0f;
}

// Log-sum-exp in base e, from row_max as a base-2
// exponent and `sum`, the sum of exp2(score − row_max).
QG_DEVICE float log_sum_exp(float row_max, float sum) {
    return sum == 0.0f ? minus_infinity() : (row_max + lg2_approx(sum)) * LN_2;
}

// Split-KV partial result: {row_max, row_sum,
// unused, unused}, then the accumulators [v_dim].
QG_DEVICE float* partial_result(const AttentionParams& p, u64 token, u32 head, u32 part) {
    const u64 row = (token * p.shape.heads + head) * p.at.parts + part;
    return reinterpret_cast<float*>(p.at.workspace) + row * (p.shape.v_dim + 4);
}
