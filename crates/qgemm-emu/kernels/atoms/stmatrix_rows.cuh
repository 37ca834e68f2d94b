// 8x8 matrices of 16-bit elements to shared memory as their rows stand in registers, one row of 16 bytes a lane.
#pragma once
#include "atoms/shared_address.cuh"

#if QG_VARIANT >= 90
QG_DEVICE void stmatrix_x4(const u32 (&d)[4], u8* row, QG_AT) { emu->stmatrix(4, 0, row, d, file, line); }
#endif
