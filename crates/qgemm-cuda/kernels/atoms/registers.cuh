// setmaxnreg: moves registers between the warpgroups of a CTA.
// It needs sm_90a or sm_120a: kernels are compiled for the chip.
#pragma once
#include "atoms/types.cuh"

#if QG_VARIANT >= 90
// All warps of a warpgroup execute it.
// It sets the registers per thread, a multiple of
// 8 from 24 to 256.
// An increase waits until other warps have released enough.
template <u32 COUNT>
QG_DEVICE void setmaxnreg_inc() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <u32 COUNT>
QG_DEVICE void setmaxnreg_dec() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}
#endif
