// Normalizes the k-tiles of X of a slice where they lie, between their arrival and their product. Gamma comes one k-tile ahead, through
// registers.
#pragma once
#include "mainloop/normalized_x.cuh"
#include "mainloop/x_slice_ring.cuh"

struct XSliceNormalizer {
    static constexpr u32 COLUMNS = (QG_K_TILE + SLICE_THREADS - 1) / SLICE_THREADS;

    // Of this thread's columns of the next k-tile.
    float gamma[COLUMNS];

    QG_DEVICE void load_gamma(XSliceNormalizer& x, const GemmParams& p, u32 k_tile, u32 slice_thread) {
#pragma unroll
        for (u32 i = 0; i < COLUMNS; i++) x.gamma[i] = RowNormalizer::gamma(p, k_tile * QG_K_TILE + i * SLICE_THREADS + slice_thread);
    }
    // For all threads of the slice to read behind a barrier.
    QG_DEVICE void put_gamma(const XSliceNormalizer& x, float (&shared)[QG_K_TILE], u32 slice_thread) {
#pragma unroll
        for (u32 i = 0; i < COLUMNS; i++)
            if (i * SLICE_THREADS + slice_thread < QG_K_TILE) st_shared(&shared[i * SLICE_THREADS + slice_thread], x.gamma[i]);
    }

    // Normalizes what this thread has copied of a k-tile, of `tokens` tokens. Columns that X does not have are zeros, and stay it but in rows
    // that are not finite.
    QG_DEVICE void normalize(XKTile& x, const RowStatistics& rows, const float (&gamma)[QG_K_TILE], u32 tokens, u32 slice_thread) {
        const u32 first = slice_thread / X_ROW_CHUNKS, group = slice_thread % X_ROW_CHUNKS;
#pragma unroll 1
        for (u32 token = first; token < QG_TILE_M && token < tokens; token += SLICE_X_ROWS) {
#pragma unroll
            for (u32 k_block = 0; k_block < K_BLOCKS; k_block++) {
                u32x4* const chunk = reinterpret_cast<u32x4*>(XStage::at(x.k_block[k_block], token, group));
                const f32x4* of = reinterpret_cast<const f32x4*>(&gamma[k_block * K_BLOCK + group * X_CHUNK_K]);
                const f32x4 low = ld_shared(of), high = ld_shared(of + 1);
                u32x4 v = ld_shared(static_cast<const u32x4*>(chunk));
                v.x = RowNormalizer::normalized_pair(rows, token, v.x, low.x, low.y);
                v.y = RowNormalizer::normalized_pair(rows, token, v.y, low.z, low.w);
                v.z = RowNormalizer::normalized_pair(rows, token, v.z, high.x, high.y);
                v.w = RowNormalizer::normalized_pair(rows, token, v.w, high.z, high.w);
                st_shared(chunk, v);
            }
        }
    }
};
