// mma.sync with FP8 operands and f32 accumulators: D += A · B.
//
// A register holds four values along k, lowest byte first.
// With g = lane/4, t = lane%4 (PTX ISA, "Matrix Fragments
// for mma.m16n8k32"):
//   A (row, k): a0 (g, 4t..4t+3), a1 (g+8, 4t..)
//               a2 (g, 4t+16..), a3 (g+8, 4t+16..)
//   B (k, column): b0 (4t..4t+3, g), b1 (4t+16.., g)
//   D: d0, d1 in row g, columns 2t, 2t+1
//      d2, d3 in row g+8
// Ada's tensor cores keep about 14 bits of a sum inside
// the instruction.
// Promote long sums to f32 often.
#pragma once
#include "atoms/types.cuh"

#if QG_VARIANT >= 89
QG_DEVICE void mma_m16n8k32_e4m3(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    asm("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
QG_DEVICE void mma_m16n8k32_e5m2(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    asm("mma.sync.aligned.m16n8k32.row.col.f32.e5m2.e5m2.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
// A is E4M3, B is E5M2.
QG_DEVICE void mma_m16n8k32_e4m3_e5m2(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    asm("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e5m2.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
#endif
