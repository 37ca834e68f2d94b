// mbarriers: shared-memory barriers that count arrivals
// and copied bytes.
// A phase completes after `count` arrivals (`mbarrier_init`)
// and all announced bytes. The next phase then begins.
#pragma once
#include "atoms/shared_address.cuh"

#if QG_VARIANT >= 80
// One thread initializes, before any thread uses the barrier.
// A CTA barrier must follow. If TMA arrives on the barrier,
// `fence_mbarrier_init` must precede this CTA barrier.
QG_DEVICE void mbarrier_init(u64* barrier, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(count) : "memory");
}
// One thread arrives and releases its earlier writes.
QG_DEVICE void mbarrier_arrive(u64* barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
}
// Waits for the phase of this parity; the first
// phase has parity 0.
// `try_wait` times out, and `test_wait`, before Hopper, does
// not block, so the wait loops.
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
// fence.mbarrier_init: makes initialized
// barriers visible to TMA.
QG_DEVICE void fence_mbarrier_init() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
// Announces `bytes` copied bytes for this phase, then arrives.
QG_DEVICE void mbarrier_arrive_expect_tx(u64* barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
                 : "memory");
}
#endif
