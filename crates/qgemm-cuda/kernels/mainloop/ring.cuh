// Ring of stages between producers and consumers.
// Each stage has a full and an empty mbarrier.
#pragma once
#include "atoms/mbarrier.cuh"

// Position in the ring.
template <u32 STAGES>
struct RingPosition {
    u32 stage;
    // Number of wraps of the ring, modulo 2.
    u32 parity;

    QG_DEVICE void next(RingPosition& at) {
        if (++at.stage == STAGES) at.stage = 0, at.parity ^= 1;
    }
    // The phase before the first counts as complete, so a stage
    // that was never filled is empty.
    QG_DEVICE void wait_empty(const RingPosition& at, u64 (&empty)[STAGES]) {
        mbarrier_wait(&empty[at.stage], at.parity ^ 1);
    }
};

// The first thread initializes, before a barrier of all users.
// A stage is full after `filling` arrivals, empty after
// `reading` arrivals.
template <u32 STAGES>
QG_DEVICE void init_ring(u64 (&full)[STAGES], u64 (&empty)[STAGES], u32 filling, u32 reading) {
#pragma unroll
    for (u32 i = 0; i < STAGES; i++) {
        mbarrier_init(&full[i], filling);
        mbarrier_init(&empty[i], reading);
    }
    fence_mbarrier_init();
}
