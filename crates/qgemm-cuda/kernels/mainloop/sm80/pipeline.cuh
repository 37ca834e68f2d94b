// Rings between cp.async copies and MMA.
// Each warp copies the k-tiles of its rows and a share of X.
// Copies run PREFETCH_DISTANCE k-blocks ahead of the MMA.
// There is no CTA barrier. A warp waits for its next k-block.
// Before it refills a stage, it waits for warps that are two
// k-blocks behind.
#pragma once
#include "atoms/mbarrier.cuh"
#include "mainloop/w_ring.cuh"
#include "mainloop/x_ring.cuh"

// K-blocks in flight during the MMA of one.
// Two more stages hold that k-block and the previous one,
// which the slowest warp may still read.
constexpr u32 PREFETCH_DISTANCE = QG_X_STAGES - 2;
static_assert(QG_X_STAGES >= 3, "at least one stage is in flight");
// A warp holds its k-tiles of W: the current one, and those of
// all k-blocks in flight.
static_assert(QG_W_STAGES == 1 + (PREFETCH_DISTANCE + K_BLOCKS - 1) / K_BLOCKS,
              "k-tiles for all k-blocks in flight");

struct Pipeline {
    XStage x[QG_X_STAGES];
    WStage w[QG_W_STAGES];
    u64 full[QG_X_STAGES];
    u64 empty[QG_X_STAGES];

    // The first thread initializes, before a CTA barrier.
    QG_DEVICE void init(Pipeline& pipeline) {
#pragma unroll
        for (u32 i = 0; i < QG_X_STAGES; i++) {
            // Every thread arrives for its copies.
            mbarrier_init(&pipeline.full[i], QG_THREADS);
            mbarrier_init(&pipeline.empty[i], QG_THREADS / 32);
        }
    }
};

// A stage of X, and the number of wraps modulo 2.
struct XPosition {
    u32 x, parity;
};

// Position in the rings.
struct Position {
    u32 x, w;
    u32 parity;

    // Stage of the k-block before last, which is filled next, and
    // the parity of its `empty` phase.
    // In the first round this phase counts as complete.
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
