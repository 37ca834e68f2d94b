// Volta's matrix instruction with operand B stored by rows: D += A · B, f16 operands and f32 accumulators, four products of 8×8×4.
//
// Lane layouts (PTX ISA, "Matrix Fragments for mma.m8n8k4 with .f16 floating point type") are those of `mma_m8n8k4_f16` in mma.cuh, but
// for B: with h = 4 (lane / 16)
//   B: b0, b1 = (k lane % 4, columns h..h+1 and h+2..h+3)
#pragma once
#include "atoms/types.cuh"

QG_DEVICE void mma_m8n8k4_row_row_f16(float (&d)[8], const u32 (&a)[2], const u32 (&b)[2]) {
    asm("mma.sync.aligned.m8n8k4.row.row.f32.f16.f16.f32 {%0, %1, %2, %3, %4, %5, %6, %7}, {%8, %9}, {%10, %11}, "
        "{%0, %1, %2, %3, %4, %5, %6, %7};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
        : "r"(a[0]), "r"(a[1]), "r"(b[0]), "r"(b[1]));
}
