// A look at a barrier in shared memory. Here it waits where the answer matters: a look at a barrier or a parity that never fills is found.
#pragma once
#include "atoms/mbarrier.cuh"

#if QG_VARIANT >= 90
QG_DEVICE bool mbarrier_test(u64* barrier, u32 parity, bool matters, QG_AT) {
    if (matters) emu->mbarrier_wait(barrier, parity, file, line);
    return matters;
}
#endif
