// 8×8 matrices of 16-bit elements to shared memory as their rows stand in registers: what atoms/stmatrix.cuh has, not transposed.
// Register m of lane l is the pair (row l / 4, columns 2 (l % 4) and the next) of matrix m.
#pragma once
#include "atoms/shared_address.cuh"

#if QG_VARIANT >= 90
QG_DEVICE void stmatrix_x4(const u32 (&d)[4], u8* row) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(row)), "r"(d[0]), "r"(d[1]),
                 "r"(d[2]), "r"(d[3])
                 : "memory");
}
#endif
