// Registers that pass between warpgroups. Emulated threads have all registers that they need; how many they may have is counted.
#pragma once
#include "atoms/types.cuh"

#if QG_VARIANT >= 90
template <u32 COUNT>
QG_DEVICE void setmaxnreg_inc(QG_AT) { emu->set_registers(COUNT, file, line); }
template <u32 COUNT>
QG_DEVICE void setmaxnreg_dec(QG_AT) { emu->set_registers(COUNT, file, line); }
#endif
