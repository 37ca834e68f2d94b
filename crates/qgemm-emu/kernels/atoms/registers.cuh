// setmaxnreg. Emulated threads have enough registers; the
// emulator only counts their limits.
#pragma once
#include "atoms/types.cuh"

#if QG_VARIANT >= 90
template <u32 COUNT>
QG_DEVICE void setmaxnreg_inc(QG_AT) { emu->set_registers(COUNT, file, line); }
template <u32 COUNT>
QG_DEVICE void setmaxnreg_dec(QG_AT) { emu->set_registers(COUNT, file, line); }
#endif
