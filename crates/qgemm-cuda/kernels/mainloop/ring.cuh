// A ring of stages between producers and consumers, each with a barrier that says that it is full, and one that it is empty.
#pragma once
#include "atoms/mbarrier.cuh"

// A position in the ring.
template <u32 STAGES>
struct RingPosition {
    u32 stage;
    // How often the stages have wrapped, modulo 2.
    u32 parity;

    QG_DEVICE void next(RingPosition& at) {
        if (++at.stage == STAGES) at.stage = 0, at.parity ^= 1;
    }
    // For a stage that has never been filled, the phase before the first counts as complete.
    QG_DEVICE void wait_empty(const RingPosition& at, u64 (&empty)[STAGES]) {
        mbarrier_wait(&empty[at.stage], at.parity ^ 1);
    }
};

// For the first thread, before a barrier of all who use the ring: `filling` arrivals make a stage full, `reading` empty.
template <u32 STAGES>
QG_DEVICE void init_ring(u64 (&full)[STAGES], u64 (&empty)[STAGES], u32 filling, u32 reading) {
#pragma unroll
    for (u32 i = 0; i < STAGES; i++) {
        mbarrier_init(&full[i], filling);
        mbarrier_init(&empty[i], reading);
    }
    fence_mbarrier_init();
}
