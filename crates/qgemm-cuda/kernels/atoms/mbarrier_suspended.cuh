// Waiting at a barrier in shared memory without taking part in what a multiprocessor does meanwhile.
#pragma once
#include "atoms/mbarrier.cuh"

#if QG_VARIANT >= 90
// `mbarrier_wait` whose thread is suspended until the phase is complete. Without a time that it may be, `try_wait` gives up after some 30
// cycles, so that a warp that repeats it takes slots, and power, of those that compute.
QG_DEVICE void mbarrier_wait_suspended(u64* barrier, u32 parity) {
    constexpr u32 MOST_NANOSECONDS = 10'000'000;
    u32 complete;
    do {
        asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2, %3; selp.u32 %0, 1, 0, p; }"
                     : "=r"(complete)
                     : "r"(shared_address(barrier)), "r"(parity), "r"(MOST_NANOSECONDS)
                     : "memory");
    } while (!complete);
}
#endif
