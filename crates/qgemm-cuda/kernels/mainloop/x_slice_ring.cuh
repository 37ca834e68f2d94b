// Activations on their way to a slice: the warps that multiply the same columns of K with different rows. They copy the
// columns into a ring of slabs for themselves, so that they wait for each other only. A slab's columns lie as chunks of 64
// in the order of `XStage`. Rows of X begin at multiples of 16 bytes, and columns follow one another.
#pragma once
#include "atoms/cp_async.cuh"
#include "atoms/sync.cuh"
#include "atoms/warp.cuh"
#include "mainloop/x_ring.cuh"

constexpr u32 SLICE_THREADS = QG_WARPS_N * 32;
// Tokens of which a slice copies a row of a stage at once, 16 bytes a thread.
constexpr u32 SLICE_X_ROWS = SLICE_THREADS / X_ROW_CHUNKS;
constexpr u32 SLICE_X_COPIES = (QG_TILE_M + SLICE_X_ROWS - 1) / SLICE_X_ROWS;

// One slab's columns of all tokens.
struct XSlab {
    XStage chunk[CHUNKS];
};

struct XSliceRing {
    XSlab slab[QG_STAGES];
};

// All threads of slice `slice`. Barrier 0 is the block's.
QG_DEVICE void slice_barrier(u32 slice) {
    if constexpr (QG_WARPS_N == 1)
        warp_barrier();
    else
        barrier_sync(1 + slice, SLICE_THREADS);
}

// What thread `thread` of a slice copies: the same 16 bytes of the rows of every SLICE_X_ROWS-th token.
struct XSliceSource {
    const u8* row;
    // Bytes from one of the thread's tokens to its next.
    u64 pitch;
    u32 token, column;

    QG_DEVICE XSliceSource of(const GemmParams& p, u32 first_token, u32 thread) {
        XSliceSource s;
        s.token = first_token + thread / X_ROW_CHUNKS;
        s.column = thread % X_ROW_CHUNKS * GROUP;
        s.row = reinterpret_cast<const u8*>(p.at.x) + (s.token * p.at.x_row + s.column) * 2;
        s.pitch = SLICE_X_ROWS * p.at.x_row * 2;
        return s;
    }

    // Starts copying the columns of slab `slab`. What lies outside X becomes zero.
    QG_DEVICE void copy(const XSliceSource& s, XSlab& to, const GemmParams& p, u32 slab, bool present, u32 thread) {
        if (!present) return;
        const u32 slab_column = slab * QG_SLAB_K;
        const u8* source = s.row + slab_column * 2;
#pragma unroll
        for (u32 chunk = 0; chunk < CHUNKS; chunk++) {
            const u32 column = slab_column + chunk * CHUNK_K + s.column;
            const u32 inside = column < p.shape.k ? (p.shape.k - column) * 2 : 0;
            const u32 bytes = inside < X_CHUNK_BYTES ? inside : X_CHUNK_BYTES;
#pragma unroll
            for (u32 i = 0; i < SLICE_X_COPIES; i++) {
                const u32 row = thread / X_ROW_CHUNKS + i * SLICE_X_ROWS;
                if (QG_TILE_M % SLICE_X_ROWS != 0 && row >= QG_TILE_M) continue;
                cp_async_16(XStage::at(to.chunk[chunk], row, thread % X_ROW_CHUNKS),
                            source + chunk * X_ROW_BYTES + i * s.pitch,
                            s.token + i * SLICE_X_ROWS < p.shape.m ? bytes : 0);
            }
        }
    }
};
