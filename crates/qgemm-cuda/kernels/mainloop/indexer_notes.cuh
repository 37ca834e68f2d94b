// What is known of queries whose keys are gathered while they are scored: the bound that keys must reach, and how many did. Bounds come from
// scores of every so many-th key. Where one misleads, too few keys reach it or more than there is room for, and the query is served again
// from all of its scores.
#pragma once
#include "mainloop/indexer_keys.cuh"

struct alignas(16) QueryNote {
    // The least score; NaN where every key is gathered.
    float least;
    // Keys that reached it, whether there was room for them or not.
    u32 count, unused[2];

    // Where the note of a query of the launch is.
    QG_DEVICE u64 place(const IndexerParams& p, u64 query) { return p.notes + query * sizeof(QueryNote); }
    QG_DEVICE QueryNote of(const IndexerParams& p, u64 query) {
        const u32x4 v = ld_global_v4(reinterpret_cast<const u8*>(place(p, query)));
        return {bits_to_f32(v.x), v.y, {v.z, v.w}};
    }
    __device__ __forceinline__ void store(const IndexerParams& p, u64 query) const {
        st_global_v4(reinterpret_cast<u8*>(place(p, query)), {f32_to_bits(least), count, 0, 0});
    }

    // Whether all keys that are wanted are among those that were gathered.
    __device__ __forceinline__ bool has_all_wanted(const IndexerParams& p) const {
        return count <= p.gathered && (count >= p.chosen || least != least);
    }
};

// Whether a key is gathered: one whose score is NaN is, too, since it may be wanted where there are few others.
QG_DEVICE bool is_reached(float least, float score) {
    return !(score < least);
}

// Where a query's gathered keys are, a score's bits below its key.
QG_DEVICE u8* gathered_keys(const IndexerParams& p, u64 query) {
    return reinterpret_cast<u8*>(p.scores) + query * p.gathered * 8;
}
