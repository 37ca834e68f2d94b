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
