// Matrix instructions of one warp with f16, bf16 or tf32 operands and f32 accumulators: D += A · B.
//
// Lane layouts (PTX ISA, "Matrix Fragments for mma.m16n8k16"), with g = lane / 4 and t = lane % 4:
//   A: a0 = (row g, k 2t..2t+1), a1 = (row g+8, k 2t..), a2 = (row g, k 2t+8..), a3 = (row g+8, k 2t+8..)
//   B: b0 = (k 2t..2t+1, column g), b1 = (k 2t+8.., column g)
//   D: d0 = (row g, column 2t), d1 = (row g, column 2t+1), d2, d3 = the same columns of row g+8
// The k8 shape has only the registers of the lower half of k.
//
// The tf32 shape m16n8k8 has an f32 a register, of which the lowest 13 bits do not count:
//   A: a0 = (row g, k t), a1 = (row g+8, k t), a2 = (row g, k t+4), a3 = (row g+8, k t+4)     B: b0 = (k t, column g), b1 = (k t+4, column g)
//
// m8n8k4 is four independent products of 8×8×4 (PTX ISA, "Matrix Fragments for mma.m8n8k4 with .f16 floating point
// type"). Lane l belongs to product (l % 16) / 4. With r = l % 4 + 4 (l / 16) and h = 4 (l / 16):
//   A: a0, a1 = (row r, k 0..1 and k 2..3)          B: b0, b1 = (k 0..1 and k 2..3, column r)
//   D: d[i] = (row l % 2 + (i & 2) + h, column (i & 4) + (l & 2) + i % 2)
// It is an instruction on Volta and Turing. Newer chips run a sequence of other instructions instead.
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
