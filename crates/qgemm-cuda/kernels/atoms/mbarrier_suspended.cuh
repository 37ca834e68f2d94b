// mbarrier wait that suspends the thread.
#pragma once
#include "atoms/mbarrier.cuh"

#if QG_VARIANT >= 90
// `mbarrier_wait` with a suspend-time hint.
// Without a hint `try_wait` returns after some 30 cycles;
// a polling warp then takes issue slots and power from
// warps that compute.
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
