// Registers that pass between the warpgroups of a CTA. The instructions exist for single chips (sm_90a, sm_120a):
// kernels that use them are compiled for the chip itself.
#pragma once
#include "atoms/types.cuh"

#if QG_VARIANT >= 90
// setmaxnreg, by all warps of a warpgroup: the number of registers of each of their threads from here on, a multiple of
// 8 from 24 to 256. An increase waits until others of the CTA have given back as many.
template <u32 COUNT>
QG_DEVICE void setmaxnreg_inc() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <u32 COUNT>
QG_DEVICE void setmaxnreg_dec() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}
#endif
