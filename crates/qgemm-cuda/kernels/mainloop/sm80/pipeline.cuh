// The rings between copies and matrix instructions. Every warp copies the k-tiles of its own rows and a share of X,
// PREFETCH_DISTANCE k-blocks before it multiplies them. No barrier holds the CTA together: a warp waits for the k-block
// that it needs, and, before it refills a stage, for warps that are two k-blocks behind.
#pragma once
#include "atoms/mbarrier.cuh"
#include "mainloop/w_ring.cuh"
#include "mainloop/x_ring.cuh"

// K-blocks in flight while one is multiplied. Of the two other stages, one holds that k-block, and one holds the
// k-block before it, which the slowest warp may still be reading.
constexpr u32 PREFETCH_DISTANCE = QG_X_STAGES - 2;
static_assert(QG_X_STAGES >= 3, "at least one stage is in flight");
// A warp holds its own k-tiles of W: the one in use and those of all k-blocks in flight.
static_assert(QG_W_STAGES == 1 + (PREFETCH_DISTANCE + K_BLOCKS - 1) / K_BLOCKS,
              "k-tiles for all k-blocks in flight");

struct Pipeline {
    XStage x[QG_X_STAGES];
    WStage w[QG_W_STAGES];
    u64 full[QG_X_STAGES];
    u64 empty[QG_X_STAGES];

    // For the first thread, before a CTA barrier.
    QG_DEVICE void init(Pipeline& pipeline) {
#pragma unroll
        for (u32 i = 0; i < QG_X_STAGES; i++) {
            // Every thread arrives with its own copies.
            mbarrier_init(&pipeline.full[i], QG_THREADS);
            mbarrier_init(&pipeline.empty[i], QG_THREADS / 32);
        }
    }
};

// A stage of X, and how often the ring has wrapped, modulo 2.
struct XPosition {
    u32 x, parity;
};

// A position in the rings.
struct Position {
    u32 x, w;
    u32 parity;

    // The stage of the k-block before the last one: the stage that is filled next. The parity is that of its phase of
    // `empty`. In the first round that phase counts as complete.
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
