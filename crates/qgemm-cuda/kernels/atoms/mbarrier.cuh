// Barriers in shared memory that count arriving threads and bytes of copies. A phase is complete when as many threads
// have arrived as `mbarrier_init` said and all announced bytes are there. The next phase then begins by itself.
#pragma once
#include "atoms/shared_address.cuh"

#if QG_VARIANT >= 80
// For one thread, before any other thread uses the barrier. A CTA barrier follows, and before it `fence_mbarrier_init`
// if TMA arrives on the barrier.
QG_DEVICE void mbarrier_init(u64* barrier, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(count) : "memory");
}
// One thread arrives and releases its earlier writes.
QG_DEVICE void mbarrier_arrive(u64* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}
// Waits until the phase of this parity is complete; a barrier's first phase has parity 0. `try_wait` gives up after a
// while, and `test_wait`, before Hopper, does not wait at all, so both are repeated.
QG_DEVICE void mbarrier_wait(u64* barrier, u32 parity) {
    u32 complete;
    do {
#if QG_VARIANT >= 90
        asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
#else
        asm volatile("{ .reg .pred p; mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
#endif
                     : "=r"(complete)
                     : "r"(shared_address(barrier)), "r"(parity)
                     : "memory");
    } while (!complete);
}
#endif

#if QG_VARIANT >= 90
// fence.mbarrier_init: makes the barriers that this thread has set up visible to TMA.
QG_DEVICE void fence_mbarrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
// Arrives after announcing `bytes` bytes that copies will bring in this phase.
QG_DEVICE void mbarrier_arrive_expect_tx(u64* barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
                 : "memory");
}
#endif
