// stmatrix, transposed: 8×8 matrices to shared memory.
// A lane gives a row of 16 bytes.
#pragma once
#include "atoms/shared_address.cuh"

#if QG_VARIANT >= 90
QG_DEVICE void stmatrix_x4_trans(const u32 (&d)[4], u8* row, QG_AT) { emu->stmatrix(4, 1, row, d, file, line); }
#endif
