// mma.sync with f16, bf16 or tf32 operands, f32
// accumulators: D += A · B.
//
// Lane layouts, with g = lane/4, t = lane%4 (PTX ISA, "Matrix
// Fragments for mma.m16n8k16"):
//   A (row, k): a0 (g, 2t..2t+1), a1 (g+8, 2t..)
//               a2 (g, 2t+8..), a3 (g+8, 2t+8..)
//   B (k, column): b0 (2t..2t+1, g), b1 (2t+8.., g)
//   D: d0, d1 in row g, columns 2t, 2t+1
//      d2, d3 in row g+8
// m16n8k8 has the registers of the lower half of k only.
//
// tf32 m16n8k8 (the low 13 bits of a register are ignored):
//   A (row, k): a0 (g, t), a1 (g+8, t)
//               a2 (g, t+4), a3 (g+8, t+4)
//   B (k, column): b0 (t, g), b1 (t+4, g)
//
// m8n8k4 is four independent 8×8×4 products (PTX ISA, "Matrix
// Fragments for mma.m8n8k4 with .f16 floating point type").
// Lane l belongs to product (l%16)/4.
// h = 4·(l/16), r = l%4 + h:
//   A: a0, a1: row r, k 0..1 and 2..3
//   B: b0, b1: column r, k 0..1 and 2..3
//   D: d[i]: row l%2 + (i&2) + h
//            column (i&4) + (l&2) + i%2
// It is native on Volta and Turing only; newer chips emulate it.
#pragma once
#include "atoms/types.cuh"

#if QG_VARIANT >= 70
QG_DEVICE void mma_m8n8k4_f16(float (&d)[8], const u32 (&a)[2], const u32 (&b)[2]) {
    asm("mma.sync.aligned.m8n8k4.row.col.f32.f16.f16.f32 {%0, %1, %2, %3, %4, %5, %6, %7}, {%8, %9}, {%10, %11}, "
        "{%0, %1, %2, %3, %4, %5, %6, %7};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3]), "+f"(d[4]), "+f"(d[5]), "+f"(d[6]), "+f"(d[7])
        : "r"(a[0]), "r"(a[1]), "r"(b[0]), "r"(b[1]));
}
#endif

#if QG_VARIANT >= 75
QG_DEVICE void mma_m16n8k8_f16(float (&d)[4], const u32 (&a)[2], u32 b) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(b));
}
#endif

#if QG_VARIANT >= 80
QG_DEVICE void mma_m16n8k16_f16(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
QG_DEVICE void mma_m16n8k16_bf16(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
QG_DEVICE void mma_m16n8k8_tf32(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
#endif
