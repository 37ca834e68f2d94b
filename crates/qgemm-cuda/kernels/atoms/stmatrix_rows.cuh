// stmatrix, not transposed (see atoms/stmatrix.cuh).
// Register m of lane l holds a pair of matrix m:
// row l/4, columns 2(l%4) and +1.
#pragma once
#include "atoms/shared_address.cuh"

#if QG_VARIANT >= 90
QG_DEVICE void stmatrix_x4(const u32 (&d)[4], u8* row) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared_address(row)), "r"(d[0]), "r"(d[1]),
                 "r"(d[2]), "r"(d[3])
                 : "memory");
}
#endif
