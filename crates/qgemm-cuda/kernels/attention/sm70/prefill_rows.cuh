// Prefill: visible keys of a lane's rows.
#pragma once
#include "attention/sm70/prefill_tile.cuh"

#if QG_VARIANT < 75
// Visible keys of the lane's rows, recomputed on use to
// save registers. Only mixed tiles, which are few, use it.
struct VisibleKeys {
    const AttentionParams& p;
    const Sequence& s;
    u32 first_query, own_row, last_query;

    __device__ __forceinline__ KeyRange operator[](u32 row) const {
        return visible_keys(p, s, least(first_query + own_row + Fragments::rows_below(row), last_query));
    }
};
#endif
