// Which keys a query of the indexer sees, and where they lie. Whatever ranges, lengths and tables hold, no place is outside of an operand.
#pragma once
#include "atoms/launch.cuh"
#include "atoms/memory.cuh"
#include "atoms/numeric.cuh"
#include "generated/abi.cuh"

// The prelude's number of E4M3; the others are those of element types.
constexpr u32 KV_E4M3 = 3;

QG_DEVICE u32 least(u32 a, u32 b) {
    return a < b ? a : b;
}
QG_DEVICE u32 word_at(u64 address, u64 i) {
    return ld_global_u32(reinterpret_cast<const u8*>(address) + i * 4);
}

// Keys from `first` on, before `end`.
struct KeyRange {
    u32 first, end;
};

// Sequence `sequence` of the launch, counted among all.
QG_DEVICE u32 sequence_index(const IndexerParams& p, u32 sequence) {
    return p.lengths ? p.first_query / p.sequence_queries + sequence : 0;
}

// What query `i` of a sequence of the launch sees.
QG_DEVICE KeyRange keys_seen(const IndexerParams& p, u32 sequence, u32 i) {
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

// Where a key's row and its scale are, in elements.
struct KeyPlace {
    u64 row, scale;
    // Whether the table names a page.
    bool is_there;
};

// Of key `key` below `most_keys`, of a sequence counted among all.
QG_DEVICE KeyPlace place_of_key(const IndexerParams& p, u32 sequence, u32 key) {
    if (!p.lengths) return {key * p.k_row, key, true};
    const u32 place = key / p.page_size, row = key - place * p.page_size;
    const u32 page = word_at(p.block_table, (u64)sequence * p.table_width + place);
    const bool is_there = page < p.pages;
    return {is_there ? page * p.k_page + row * p.k_row : 0, is_there ? page * p.k_scale_page + row : 0, is_there};
}

// Bits of a score as they are stored: every NaN is the same, so that none is mistaken for a key that is not seen.
QG_DEVICE u32 score_bits(float score) {
    return score == score ? f32_to_bits(score) : 0x7fffffffu;
}
