// Registers that pass between the warpgroups of a block. They exist on chips of their own (sm_90a, sm_120a): kernels that use them are
// compiled for the chip itself.
#pragma once
#include "atoms/types.cuh"

#if QG_VARIANT >= 90
// setmaxnreg, by all warps of a warpgroup: how many registers each of their threads has from here on. Multiples of 8 from 24
// to 256; more must have been given back by others of the block, and are waited for.
template <u32 COUNT>
QG_DEVICE void setmaxnreg_inc() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <u32 COUNT>
QG_DEVICE void setmaxnreg_dec() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}
#endif
