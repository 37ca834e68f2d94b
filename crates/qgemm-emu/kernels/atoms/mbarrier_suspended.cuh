// mbarrier wait that suspends; here a plain wait.
#pragma once
#include "atoms/mbarrier.cuh"

#if QG_VARIANT >= 90
QG_DEVICE void mbarrier_wait_suspended(u64* barrier, u32 parity, QG_AT) { emu->mbarrier_wait(barrier, parity, file, line); }
#endif
