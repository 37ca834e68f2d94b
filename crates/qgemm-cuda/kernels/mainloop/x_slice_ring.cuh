// Ring of X k-tiles of a slice.
// A slice is the warps with the same columns of K and
// different rows. Each slice has a ring, so that its warps
// wait only for each other.
// Columns form k-blocks of 64 in the order of `XStage`.
// Rows of X are 16-byte aligned with contiguous columns.
#pragma once
#include "atoms/cp_async.cuh"
#include "atoms/opaque_register.cuh"
#include "atoms/sync.cuh"
#include "atoms/warp.cuh"
#include "mainloop/x_ring.cuh"
#include "sched/rows.cuh"

constexpr u32 SLICE_THREADS = QG_WARPS_N * 32;
// Tokens per pass of a slice, 128 bytes each, 16 a thread.
constexpr u32 SLICE_X_ROWS = SLICE_THREADS / X_ROW_CHUNKS;
constexpr u32 SLICE_X_COPIES = (QG_TILE_M + SLICE_X_ROWS - 1) / SLICE_X_ROWS;

// Whether X is copied through L1, where the second CTA of the
// SM then finds it.
// It pays for CTAs with most rows, which start together.
// It costs time with 64 rows.
constexpr bool COPIES_X_THROUGH_L1 = QG_ROW_TILES > 4;

// Columns of a k-tile, all tokens.
struct XKTile {
    XStage k_block[K_BLOCKS];
};

struct XSliceRing {
    XKTile k_tile[QG_STAGES];
};

// Barrier of all threads of a slice; the CTA uses barrier 0.
QG_DEVICE void slice_barrier(u32 slice) {
    if constexpr (QG_WARPS_N == 1)
        warp_barrier();
    else
        barrier_sync(1 + slice, SLICE_THREADS);
}

// A thread's share of X: 16 bytes of every
// SLICE_X_ROWS-th token.
struct XSliceSource {
    // Addresses in the next k-tile.
    const u8* row[SLICE_X_COPIES];
    // Number of these rows inside X.
    u32 rows;
    // Shared address of the first row's bytes in stage 0.
    u32 target;

    QG_DEVICE XSliceSource of(const GemmParams& p, XSliceRing& ring, u32 first_token, u32 k_tile, u32 thread) {
        XSliceSource s;
        const u32 first = thread / X_ROW_CHUNKS, group = thread % X_ROW_CHUNKS;
        s.rows = 0;
#pragma unroll
        for (u32 i = 0; i < SLICE_X_COPIES; i++) {
            const u32 token = first_token + first + i * SLICE_X_ROWS;
            u32 own;
            if (find_x_row(p, token, own)) s.rows = i + 1;
            s.row[i] =
                reinterpret_cast<const u8*>(p.at.x) + (own * p.at.x_row + k_tile * QG_K_TILE + group * X_CHUNK_K) * 2;
        }
        s.rows = opaque_register(s.rows);
        s.target = opaque_register(shared_address(XStage::at(ring.k_tile[0].k_block[0], first, group)));
        return s;
    }

    // Starts the copy of k-tile `k_tile` to stage `stage`,
    // zero-filled outside X. Advances by `k_tiles` k-tiles.
    QG_DEVICE void copy(XSliceSource& s, const GemmParams& p, u32 k_tile, u32 stage, u32 k_tiles, u32 thread) {
        const u32 first = k_tile * QG_K_TILE;
        if (first + QG_K_TILE <= p.shape.k)
            copy_columns<true>(s, stage, 0, thread);
        else
            // Long groups may leave k-tiles past the last column.
            copy_columns<false>(s, stage, first < p.shape.k ? p.shape.k - first : 0, thread);
#pragma unroll
        for (u32 i = 0; i < SLICE_X_COPIES; i++) s.row[i] += k_tiles * QG_K_TILE * 2;
    }

    // Copies all columns of a k-tile, or the first `columns`.
    template <bool ALL>
    QG_DEVICE void copy_columns(const XSliceSource& s, u32 stage, u32 columns, u32 thread) {
#pragma unroll
        for (u32 i = 0; i < SLICE_X_COPIES; i++) {
            // Four tokens further, chunk bit 2 flips (`XStage`).
            const u32 first = SLICE_X_ROWS % 8 == 0 ? s.target : s.target ^ i % 2 * 4 * X_CHUNK_BYTES;
#pragma unroll
            for (u32 k_block = 0; k_block < K_BLOCKS; k_block++) {
                const u32 target =
                    first + stage * sizeof(XKTile) + k_block * X_STAGE_BYTES + i * SLICE_X_ROWS * X_ROW_BYTES;
                const u8* source = s.row[i] + k_block * X_ROW_BYTES;
                if constexpr (ALL) {
                    if constexpr (COPIES_X_THROUGH_L1)
                        cp_async_16_or_zeros_l1(i < s.rows, target, source);
                    else
                        cp_async_16_or_zeros(i < s.rows, target, source);
                } else {
                    const u32 column = k_block * K_BLOCK + thread % X_ROW_CHUNKS * X_CHUNK_K;
                    const u32 inside = i < s.rows && column < columns ? (columns - column) * 2 : 0;
                    cp_async_16(target, source, inside < X_CHUNK_BYTES ? inside : X_CHUNK_BYTES);
                }
            }
        }
    }
};
static_assert(SLICE_X_ROWS % 4 == 0, "places of rows that are copied together");
static_assert(QG_TILE_M % SLICE_X_ROWS == 0, "all threads copy as many rows");
