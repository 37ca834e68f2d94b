// stmatrix, not transposed.
// A lane gives a row of 16 bytes.
#pragma once
#include "atoms/shared_address.cuh"

#if QG_VARIANT >= 90
QG_DEVICE void stmatrix_x4(const u32 (&d)[4], u8* row, QG_AT) { emu->stmatrix(4, 0, row, d, file, line); }
#endif
