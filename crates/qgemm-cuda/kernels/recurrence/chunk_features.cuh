// Linear attention in chunks: queries and keys
// whose features decay by themselves. The kernel
// of the matrices writes them, and the kernel of
// the states reads them.
#pragma once
#include "recurrence/chunk_planes.cuh"

// Rows of a token: its query and key, which
// decay from the chunk's begin, and its key that
// decays to the chunk's end; each as hi and lo.
enum DecayedRow : u32 { DECAYED_QUERY, DECAYED_KEY, KEY_OF_STATE, DECAYED_ROWS };

// Address of a feature of a row. A chunk is
// [row][part][token][MOST_DIM].
QG_DEVICE u8* decayed_at(const ChunkedParams& p, u64 first_row, u32 row, u32 part, u32 i, u32 feature) {
    const u64 of_chunk = first_row * (DECAYED_ROWS * 2 * MOST_DIM);
    return reinterpret_cast<u8*>(p.chunks.decayed) + (of_chunk + ((row * 2 + part) * CHUNK + i) * MOST_DIM + feature) * 2;
}

// The chunk's decay of each feature takes the
// place of the factors of its tokens.
QG_DEVICE float* feature_decays(const ChunkedParams& p, u64 first_row) {
    static_assert(MOST_DIM * sizeof(float) == CHUNK * sizeof(TokenFactors), "a number for each feature");
    return reinterpret_cast<float*>(factors_of(p, first_row));
}

// Writes a feature of a row.
QG_DEVICE void write_decayed(const ChunkedParams& p, u64 first_row, u32 row, u32 i, u32 feature, float value) {
    u32 hi, lo;
    split_finite_bf16x2(hi, lo, value, 0.0f);
    st_global_u16(decayed_at(p, first_row, row, 0, i, feature), hi);
    st_global_u16(decayed_at(p, first_row, row, 1, i, feature), lo);
}

