// stmatrix, transposed: 8×8 matrices of 16-bit elements
// to shared memory.
// Lane 8m + r gives the address of row r of matrix m.
// Rows are 16 bytes at multiples of 16.
// Register m of lane l holds a pair of matrix m,
// as in `ldmatrix`:
// rows 2(l%4) and +1, column l/4.
#pragma once
#include "atoms/shared_address.cuh"

#if QG_VARIANT >= 90
QG_DEVICE void stmatrix_x4_trans(const u32 (&d)[4], u8* row) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(row)), "r"(d[0]),
                 "r"(d[1]), "r"(d[2]), "r"(d[3])
                 : "memory");
}
#endif
