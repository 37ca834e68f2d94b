// A look at a barrier in shared memory that waits for nothing.
#pragma once
#include "atoms/mbarrier.cuh"

#if QG_VARIANT >= 90
// Whether the phase of this parity is complete, where it `matters`; else no. What threads and copies of a complete phase wrote is seen, as
// after `mbarrier_wait`. There is no branch, so that it may stand where matrix instructions run.
QG_DEVICE bool mbarrier_test(u64* barrier, u32 parity, bool matters) {
    u32 complete;
    asm volatile(
        "{ .reg .pred p, q; setp.ne.u32 q, %3, 0; setp.ne.u32 p, 0, 0; "
        "@q mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
        : "=r"(complete)
        : "r"(shared_address(barrier)), "r"(parity), "r"((u32)matters)
        : "memory");
    return complete != 0;
}
#endif
