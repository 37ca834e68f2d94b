// mbarriers: count arrivals and copied bytes.
#pragma once
#include "atoms/types.cuh"

#if QG_VARIANT >= 80
QG_DEVICE void mbarrier_init(u64* barrier, u32 count, QG_AT) { emu->mbarrier_init(barrier, count, file, line); }
QG_DEVICE void mbarrier_arrive(u64* barrier, QG_AT) { emu->mbarrier_arrive(barrier, 0, file, line); }
QG_DEVICE void mbarrier_wait(u64* barrier, u32 parity, QG_AT) { emu->mbarrier_wait(barrier, parity, file, line); }
#endif

#if QG_VARIANT >= 90
QG_DEVICE void fence_mbarrier_init() { emu->mbarrier_fence(); }
QG_DEVICE void mbarrier_arrive_expect_tx(u64* barrier, u32 bytes, QG_AT) {
    emu->mbarrier_arrive(barrier, bytes, file, line);
}
#endif
