// mma.sync with s8 operands and wrapping s32
// accumulators: D += A · B.
//
// A register holds four values along k, lowest byte first.
// With g = lane/4, t = lane%4 (PTX ISA, "Matrix Fragments for
// mma.m8n8k16", "… mma.m16n8k16", "… mma.m16n8k32"):
//   m8n8k16:  a: row g, k 4t..4t+3
//             b: k 4t..4t+3, column g
//             d0, d1: row g, columns 2t, 2t+1
//   m16n8k16: a0 in row g, a1 in row g+8, b as above
//             d0, d1 in row g, d2, d3 in row g+8
//   m16n8k32: a0, a1 at k 4t.., a2, a3 at 4t+16..
//             b0 at k 4t.., b1 at k 4t+16..
#pragma once
#include "atoms/types.cuh"

#if QG_VARIANT >= 75
QG_DEVICE void mma_m8n8k16_s8(i32 (&d)[2], u32 a, u32 b) {
    asm("mma.sync.aligned.m8n8k16.row.col.s32.s8.s8.s32 {%0, %1}, {%2}, {%3}, {%0, %1};"
        : "+r"(d[0]), "+r"(d[1])
        : "r"(a), "r"(b));
}
#endif

#if QG_VARIANT >= 80
QG_DEVICE void mma_m16n8k16_s8(i32 (&d)[4], const u32 (&a)[2], u32 b) {
    asm("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(b));
}
QG_DEVICE void mma_m16n8k32_s8(i32 (&d)[4], const u32 (&a)[4], const u32 (&b)[2]) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+r"(d[0]), "+r"(d[1]), "+r"(d[2]), "+r"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
#endif
