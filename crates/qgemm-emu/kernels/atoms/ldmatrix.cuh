// ldmatrix: 8×8 matrices of 16-bit elements from shared memory.
// A lane gives a row of 16 bytes.
#pragma once
#include "atoms/shared_address.cuh"

#if QG_VARIANT >= 75
QG_DEVICE void ldmatrix_x1(u32 (&d)[1], const u8* row, QG_AT) { emu->ldmatrix(1, 0, row, d, file, line); }
QG_DEVICE void ldmatrix_x2(u32 (&d)[2], const u8* row, QG_AT) { emu->ldmatrix(2, 0, row, d, file, line); }
QG_DEVICE void ldmatrix_x4(u32 (&d)[4], const u8* row, QG_AT) { emu->ldmatrix(4, 0, row, d, file, line); }
QG_DEVICE void ldmatrix_x4(u32 (&d)[4], u32 row, QG_AT) {
    emu->ldmatrix(4, 0, emu->place()->shared + row, d, file, line);
}
QG_DEVICE void ldmatrix_x1_trans(u32 (&d)[1], const u8* row, QG_AT) { emu->ldmatrix(1, 1, row, d, file, line); }
QG_DEVICE void ldmatrix_x2_trans(u32 (&d)[2], const u8* row, QG_AT) { emu->ldmatrix(2, 1, row, d, file, line); }
QG_DEVICE void ldmatrix_x4_trans(u32 (&d)[4], const u8* row, QG_AT) { emu->ldmatrix(4, 1, row, d, file, line); }
QG_DEVICE void ldmatrix_x4_trans(u32 (&d)[4], u32 row, QG_AT) {
    emu->ldmatrix(4, 1, emu->place()->shared + row, d, file, line);
}
#endif
