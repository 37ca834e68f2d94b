// A ring of the k-tiles of X of a slice: the warps that multiply the same columns of K with different rows. A slice has
// its own ring, so that its warps wait only for each other. A k-tile's columns lie as k-blocks of 64 in the order of
// `XStage`. Rows of X begin at multiples of 16 bytes, and columns follow one another.
#pragma once
#include "atoms/cp_async.cuh"
#include "atoms/opaque_register.cuh"
#include "atoms/sync.cuh"
#include "atoms/warp.cuh"
#include "mainloop/x_ring.cuh"
#include "sched/rows.cuh"

constexpr u32 SLICE_THREADS = QG_WARPS_N * 32;
// Tokens of which a slice copies a 128-byte row at once, 16 bytes a thread.
constexpr u32 SLICE_X_ROWS = SLICE_THREADS / X_ROW_CHUNKS;
constexpr u32 SLICE_X_COPIES = (QG_TILE_M + SLICE_X_ROWS - 1) / SLICE_X_ROWS;

// Whether X is copied through L1, so that the second CTA of a multiprocessor finds there what the first has read. That
// pays for CTAs with most rows, which begin together (28672 × 8192, 16 tokens on an H200: 36.2 us and not 37.1 us), and
// costs with 64 rows (44.2 us and not 40.9 us).
constexpr bool COPIES_X_THROUGH_L1 = QG_ROW_TILES > 4;

// One k-tile's columns of all tokens.
struct XKTile {
    XStage k_block[K_BLOCKS];
};

struct XSliceRing {
    XKTile k_tile[QG_STAGES];
};

// A barrier of all threads of slice `slice`. Barrier 0 is the CTA's.
QG_DEVICE void slice_barrier(u32 slice) {
    if constexpr (QG_WARPS_N == 1)
        warp_barrier();
    else
        barrier_sync(1 + slice, SLICE_THREADS);
}

// The part of X that a thread of a slice copies: the same 16 bytes of the rows of every SLICE_X_ROWS-th token.
struct XSliceSource {
    // The addresses in the columns of the next k-tile.
    const u8* row[SLICE_X_COPIES];
    // How many of these rows lie in X.
    u32 rows;
    // The shared address of the first row's bytes in the first stage.
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

    // Starts copying k-tile `k_tile`, the next one, to stage `stage` of the ring, and moves on by `k_tiles` k-tiles.
    // Bytes outside X become zero.
    QG_DEVICE void copy(XSliceSource& s, const GemmParams& p, u32 k_tile, u32 stage, u32 k_tiles, u32 thread) {
        const u32 first = k_tile * QG_K_TILE;
        if (first + QG_K_TILE <= p.shape.k)
            copy_columns<true>(s, stage, 0, thread);
        else
            // Groups that are longer than a k-tile may leave k-tiles behind the last column.
            copy_columns<false>(s, stage, first < p.shape.k ? p.shape.k - first : 0, thread);
#pragma unroll
        for (u32 i = 0; i < SLICE_X_COPIES; i++) s.row[i] += k_tiles * QG_K_TILE * 2;
    }

    // Copies all columns of a k-tile, or its first `columns`.
    template <bool ALL>
    QG_DEVICE void copy_columns(const XSliceSource& s, u32 stage, u32 columns, u32 thread) {
#pragma unroll
        for (u32 i = 0; i < SLICE_X_COPIES; i++) {
            // Four tokens further, the other half of a row's 16-byte chunks changes places (`XStage`).
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
