// Registers that pass between warpgroups. Emulated threads have all registers that they need.
#pragma once
#include "atoms/types.cuh"

#if QG_VARIANT >= 90
template <u32 COUNT>
QG_DEVICE void setmaxnreg_inc() {}
template <u32 COUNT>
QG_DEVICE void setmaxnreg_dec() {}
#endif
