// Sparse-attention indexer: gathering candidate keys during
// scoring. A score bound per query comes from a sample of
// keys. If it misleads (too few keys reach it, or more than
// fit), the query is processed again from all of its scores.
//
// Warps do not wait for each other. Each warp appends scores to
// its own chunks, and writes one record for each query and 16
// keys: which keys are candidates, and where their scores are.
#pragma once
#include "atoms/sync.cuh"
#include "mainloop/indexer_keys.cuh"

struct alignas(16) QueryState {
    // Score bound; NaN gathers every key.
    float least;
    // Whether the top-k came from the gathered keys.
    u32 is_served;
    u32 unused[2];

    // Address of a query's state.
    QG_DEVICE u64 address(const IndexerParams& p, u64 query) { return p.query_states + query * sizeof(QueryState); }
    QG_DEVICE QueryState of(const IndexerParams& p, u64 query) {
        const u32x4 v = ld_global_v4(reinterpret_cast<const u8*>(address(p, query)));
        return {bits_to_f32(v.x), v.y, {v.z, v.w}};
    }
    __device__ __forceinline__ void store(const IndexerParams& p, u64 query) const {
        st_global_v4(reinterpret_cast<u8*>(address(p, query)), {f32_to_bits(least), is_served, 0, 0});
    }
};

// State of all queries.
struct alignas(16) FoundHeader {
    // Spare chunks requested (possibly more than
    // exist); queries with a misleading bound.
    u32 taken, misled;
    u32 unused[2];

    QG_DEVICE u32* taken_chunks(const IndexerParams& p) { return reinterpret_cast<u32*>(p.found_header); }
    QG_DEVICE u32* misled_queries(const IndexerParams& p) { return reinterpret_cast<u32*>(p.found_header + QG_OFFSET_OF(FoundHeader, misled)); }
    QG_DEVICE void clear(const IndexerParams& p) { st_global_v4(reinterpret_cast<u8*>(p.found_header), {0, 0, 0, 0}); }
    // Whether no query is left for the fallback launches.
    QG_DEVICE bool all_are_served(const IndexerParams& p) {
        return p.query_states != 0 && ld_global_u32(reinterpret_cast<const u8*>(misled_queries(p))) == 0;
    }
};

// Scores per chunk. Chunk 0 absorbs scores that do not
// fit; spare chunks follow, then one chunk per warp.
constexpr u32 CHUNK = 1024;
// Keys per warp, and per CTA.
constexpr u32 RECORD_KEYS = 16, GATHER_KEYS = 256;

// Candidates among 16 keys for two queries, as a lane mask of the
// warp that scored them. Their scores are contiguous from `first` on.
struct alignas(8) FoundRecord {
    u32 first_and_query;
    u32 lanes;

    // `query`: 0 or 1.
    QG_DEVICE FoundRecord of(u32 first, u32 query, u32 lanes) { return {first * 2 + query, lanes}; }
    __device__ __forceinline__ u32 first() const { return first_and_query / 2; }
    // Lanes of the record's query.
    __device__ __forceinline__ u32 own() const { return lanes & 0x33333333u << first_and_query % 2 * 2; }
    // Key of a lane among the 16.
    QG_DEVICE u32 key(u32 lane) { return lane / 4 + lane % 2 * 8; }
};

// Address of the record for keys from `key` on.
// Row 0 is a dummy; rows of queries follow.
QG_DEVICE u8* found_record(const IndexerParams& p, u32 row, u32 key) {
    return reinterpret_cast<u8*>(p.scores) + (u64)(row * (u32)p.scores_row + key / RECORD_KEYS) * sizeof(FoundRecord);
}
QG_DEVICE u8* found_score(const IndexerParams& p, u32 at) {
    return reinterpret_cast<u8*>(p.found) + (u64)at * 4;
}

// Whether a key is a candidate. NaN scores
// are: they count if few other keys exist.
QG_DEVICE bool is_reached(float least, float score) {
    return !(score < least);
}
