// Sparse-attention indexer: visible keys of a query, and key
// addressing. Indices are clamped: no content of ranges,
// lengths or tables makes an access go out of bounds.
#pragma once
#include "atoms/launch.cuh"
#include "atoms/memory.cuh"
#include "atoms/numeric.cuh"
#include "generated/abi.cuh"

// E4M3 in the prelude; other values are element types.
constexpr u32 KV_E4M3 = 3;

QG_DEVICE u32 least(u32 a, u32 b) {
    return a < b ? a : b;
}
QG_DEVICE u32 word_at(u64 address, u64 i) {
    return ld_global_u32(reinterpret_cast<const u8*>(address) + i * 4);
}

// Half-open range of keys.
struct KeyRange {
    u32 first, end;
};

// Index of a launch's sequence among all sequences.
QG_DEVICE u32 sequence_index(const IndexerParams& p, u32 sequence) {
    return p.lengths ? p.first_query / p.sequence_queries + sequence : 0;
}

// Visible keys of query `i` of a sequence.
QG_DEVICE KeyRange visible_range(const IndexerParams& p, u32 sequence, u32 i) {
    if (p.lengths) {
        const u32 length = least(word_at(p.lengths, sequence_index(p, sequence)), p.most_keys);
        const u32 end = length + i + 1;
        return {0, end > p.sequence_queries ? end - p.sequence_queries : 0};
    }
    if (!p.starts) return {0, p.most_keys};
    const u64 query = (u64)p.first_query + i;
    const u32 end = least(word_at(p.ends, query), p.most_keys);
    return {least(word_at(p.starts, query), end), end};
}

// Offsets of a key's row and scale, in elements.
struct KeyAddress {
    u64 row, scale;
    // Whether the block table has a valid page for the key.
    bool is_there;
};

// `sequence` counts among all sequences; `key` is below `most_keys`.
QG_DEVICE KeyAddress address_of_key(const IndexerParams& p, u32 sequence, u32 key) {
    if (!p.lengths) return {key * p.k_row, key, true};
    const u32 place = key / p.page_size, row = key - place * p.page_size;
    const u32 page = word_at(p.block_table, (u64)sequence * p.table_width + place);
    const bool is_there = page < p.pages;
    return {is_there ? page * p.k_page + row * p.k_row : 0, is_there ? page * p.k_scale_page + row : 0, is_there};
}

// Stored score bits. NaN is canonical, so that
// no NaN equals the marker of masked keys.
QG_DEVICE u32 score_bits(float score) {
    return score == score ? f32_to_bits(score) : 0x7fffffffu;
}
