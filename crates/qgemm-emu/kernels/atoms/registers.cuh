// Threads here have all registers that they want.
#pragma once
#include "atoms/types.cuh"

#if QG_VARIANT >= 90
template <u32 COUNT>
QG_DEVICE void setmaxnreg_inc() {}
template <u32 COUNT>
QG_DEVICE void setmaxnreg_dec() {}
#endif
