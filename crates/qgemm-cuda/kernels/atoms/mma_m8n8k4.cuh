// Volta's m8n8k4 with row- or column-major operands: D += A · B.
// f16 operands, f32 accumulators, four 8×8×4 products.
// Names give the order of A, then of B.
// `mma_m8n8k4_f16` in mma.cuh has row-major A
// and column-major B.
//
// Lane layouts as in mma.cuh, except, with h = 4·(lane/16)
// (PTX ISA, "Matrix Fragments for mma.m8n8k4 with .f16
// floating point type"):
//   A column-major: k lane%4
//                   a0, a1: rows h..h+1, h+2..h+3
//   B row-major:    k lane%4
//                   b0, b1: columns h..h+1, h+2..h+3
#pragma once
#include "atoms/types.cuh"

#define QG_MMA_ORDERS(name, a_order, b_order)                                                                            \
    QG_DEVICE void name(float (&d)[8], const u32 (&a)[2], const u32 (&b)[2]) {                                           \
        asm("mma.sync.aligned.m8n8k4." a_order "." b_order ".f32.f16.f16.f32 {%0, %1, %2, %3, %4, %5, %6, %7}, {%8, %9}, " \
            "{%10, %11}, {%0, %1, %2, %3, %4, %5, %6, %7};"                                                              \
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])             \
            : "r"(a[0]), "r"(a[1]), "r"(b[0]), "r"(b[1]));                                                               \
    }

QG_MMA_ORDERS(mma_m8n8k4_row_row_f16, "row", "row")
QG_MMA_ORDERS(mma_m8n8k4_col_col_f16, "col", "col")
QG_MMA_ORDERS(mma_m8n8k4_col_row_f16, "col", "row")
#undef QG_MMA_ORDERS
