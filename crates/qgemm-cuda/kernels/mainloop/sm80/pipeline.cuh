// The rings between copies and matrix instructions. Every warp copies the slabs of its own rows and a share of X, chunks
// ahead of the one that it multiplies, and no barrier holds the block together: warps wait for the chunk that they need,
// and before they refill a stage for those that are two chunks behind.
#pragma once
#include "atoms/mbarrier.cuh"
#include "mainloop/w_ring.cuh"
#include "mainloop/x_ring.cuh"

// Chunks on their way while one is multiplied. Of the two other stages, one is that chunk's, and one was the last one's,
// which the slowest warp may still be reading.
constexpr u32 PREFETCH_DISTANCE = QG_X_STAGES - 2;
static_assert(QG_X_STAGES >= 3, "at least one stage is in flight");
// Slabs of W are a warp's own: the one in use and those of all chunks on their way.
static_assert(QG_W_STAGES == 1 + (PREFETCH_DISTANCE + K_BLOCKS - 1) / K_BLOCKS,
              "k-tiles for all k-blocks in flight");

struct Pipeline {
    XStage x[QG_X_STAGES];
    WStage w[QG_W_STAGES];
    u64 full[QG_X_STAGES];
    u64 empty[QG_X_STAGES];

    // By the first thread, before a block barrier.
    QG_DEVICE void init(Pipeline& pipeline) {
#pragma unroll
        for (u32 i = 0; i < QG_X_STAGES; i++) {
            // Every thread arrives with its own asynchronous copies.
            mbarrier_init(&pipeline.full[i], QG_THREADS);
            mbarrier_init(&pipeline.empty[i], QG_THREADS / 32);
        }
    }
};

// A stage of X, and how often the ring has gone round, modulo 2.
struct XPosition {
    u32 x, parity;
};

// A place in the rings.
struct Position {
    u32 x, w;
    u32 parity;

    // Where the chunk before the last one was multiplied: the stage that is filled next. The parity is that of the phase of
    // `empty` in which it was; the first time round nobody waits.
    QG_DEVICE XPosition two_k_blocks_ago(const Position& at) {
        const bool wraps = at.x < 2;
        return {wraps ? at.x + PREFETCH_DISTANCE : at.x - 2, wraps ? at.parity ^ 1 : at.parity};
    }

    QG_DEVICE void next_k_block(Position& at) {
        if (++at.x == QG_X_STAGES) at.x = 0, at.parity ^= 1;
    }
    QG_DEVICE void next_k_tile(Position& at) {
        if (++at.w == QG_W_STAGES) at.w = 0;
    }
};
