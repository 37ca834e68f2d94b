// What is known of queries whose keys are gathered while they are scored. Bounds that keys must reach come from scores of every so many-th key.
// Where one misleads, so that too few keys reach it, or more than there is room for, the query is served again from all of its scores.
//
// No warp waits for another: each writes scores that it finds one behind the other to chunks of its own, and for each query and 16 keys a
// record which of these there are and where.
#pragma once
#include "atoms/sync.cuh"
#include "mainloop/indexer_keys.cuh"

struct alignas(16) QueryNote {
    // The least score; NaN where every key is gathered.
    float least;
    // Whether keys have been chosen among those that were gathered.
    u32 is_served;
    u32 unused[2];

    // Where the note of a query of the launch is.
    QG_DEVICE u64 place(const IndexerParams& p, u64 query) { return p.notes + query * sizeof(QueryNote); }
    QG_DEVICE QueryNote of(const IndexerParams& p, u64 query) {
        const u32x4 v = ld_global_v4(reinterpret_cast<const u8*>(place(p, query)));
        return {bits_to_f32(v.x), v.y, {v.z, v.w}};
    }
    __device__ __forceinline__ void store(const IndexerParams& p, u64 query) const {
        st_global_v4(reinterpret_cast<u8*>(place(p, query)), {f32_to_bits(least), is_served, 0, 0});
    }
};

// What is known of all queries.
struct alignas(16) FoundHeader {
    // Spare chunks that are taken, whether there are as many or not; queries that are not served.
    u32 taken, misled;
    u32 unused[2];

    QG_DEVICE u32* taken_chunks(const IndexerParams& p) { return reinterpret_cast<u32*>(p.found_header); }
    QG_DEVICE u32* misled_queries(const IndexerParams& p) { return reinterpret_cast<u32*>(p.found_header + QG_OFFSET_OF(FoundHeader, misled)); }
    QG_DEVICE void clear(const IndexerParams& p) { st_global_v4(reinterpret_cast<u8*>(p.found_header), {0, 0, 0, 0}); }
    // Whether launches that serve queries again have nothing to do.
    QG_DEVICE bool all_are_served(const IndexerParams& p) {
        return p.notes != 0 && ld_global_u32(reinterpret_cast<const u8*>(misled_queries(p))) == 0;
    }
};

// Scores of a chunk. The first one takes what there is no room for, the next ones are spare, and behind these each warp has one.
constexpr u32 CHUNK = 1024;
// Keys of a warp, and of a CTA.
constexpr u32 RECORD_KEYS = 16, GATHER_KEYS = 256;

// Which of 16 keys reach the bounds of two queries, as lanes of the warp that has them. The scores are one behind the other, from `first` on.
struct alignas(8) FoundRecord {
    u32 first_and_query;
    u32 lanes;

    // Of the first or the second query.
    QG_DEVICE FoundRecord of(u32 first, u32 query, u32 lanes) { return {first * 2 + query, lanes}; }
    __device__ __forceinline__ u32 first() const { return first_and_query / 2; }
    // Lanes that have keys of the record's query.
    __device__ __forceinline__ u32 own() const { return lanes & 0x33333333u << first_and_query % 2 * 2; }
    // A lane's key among the sixteen.
    QG_DEVICE u32 key(u32 lane) { return lane / 4 + lane % 2 * 8; }
};

// Where the record of a row and of keys from `key` on is. Row 0 is nobody's; those of queries are behind it.
QG_DEVICE u8* found_record(const IndexerParams& p, u32 row, u32 key) {
    return reinterpret_cast<u8*>(p.scores) + (u64)(row * (u32)p.scores_row + key / RECORD_KEYS) * sizeof(FoundRecord);
}
QG_DEVICE u8* found_score(const IndexerParams& p, u32 at) {
    return reinterpret_cast<u8*>(p.found) + (u64)at * 4;
}

// Whether a key is gathered: one whose score is NaN is, too, since it may be wanted where there are few others.
QG_DEVICE bool is_reached(float least, float score) {
    return !(score < least);
}
