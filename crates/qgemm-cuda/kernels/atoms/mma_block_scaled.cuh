// Block-scaled mma.sync with FP4 (E2M1) or FP8 operands:
// D += (A·SA) · (B·SB), one scale per block along k.
// Only sm_120a and sm_121a have it: kernels are
// compiled for the chip.
//
// m16n8k64: a register holds eight values along k,
// lowest nibble first.
// With g = lane/4, t = lane%4 (PTX ISA, "Matrix Fragments
// for mma.m16n8k64"):
//   A (row, k): a0 (g, 8t..8t+7), a1 (g+8, 8t..)
//               a2 (g, 8t+32..), a3 (g+8, 8t+32..)
//   B (k, column): b0 (8t..8t+7, g), b1 (8t+32.., g)
// m16n8k32 has byte elements and the fragments of `mma_fp8.cuh`.
// An E2M1 element occupies bits 2..5 of its byte.
//   D: d0, d1 in row g, columns 2t, 2t+1
//      d2, d3 in row g+8
// Scales (PTX ISA, "Block Scaling for mma.sync"):
// byte `byte` + i of a word scales the i-th block along k.
//   scale_a: lane t = 2 · thread holds row g,
//            lane t = 2 · thread + 1 holds row g+8
//   scale_b: lane t = thread holds column g
// Words of other lanes are not read.
// `byte` and `thread` must be constants.
#pragma once
#include "atoms/types.cuh"

#if QG_VARIANT >= 120
// Byte and lane selectors of an operand's scales;
// `thread` is 0 or 1.
struct ScaleSelector {
    u32 byte, thread;
};

#define QG_MMA_BLOCK_SCALED(SHAPE_AND_TYPES)                                                                           \
    asm("mma.sync.aligned." SHAPE_AND_TYPES                                                                            \
        " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3}, {%10}, {%11, %12}, {%13}, {%14, %15};"       \
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                                               \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(scale_a), "h"((u16)at_a.byte),         \
          "h"((u16)at_a.thread), "r"(scale_b), "h"((u16)at_b.byte), "h"((u16)at_b.thread))

// UE8M0 scales, 2^(e - 127), one per 32 values:
// bytes 0 and 1, or 2 and 3.
QG_DEVICE void mma_m16n8k64_mxf4(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2], u32 scale_a, ScaleSelector at_a, u32 scale_b,
                                 ScaleSelector at_b) {
    QG_MMA_BLOCK_SCALED("m16n8k64.row.col.kind::mxf4.block_scale.scale_vec::2X.f32.e2m1.e2m1.f32.ue8m0");
}
// UE4M3 scales (unsigned E4M3), one per 16
// values: all four bytes.
QG_DEVICE void mma_m16n8k64_nvf4(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2], u32 scale_a, ScaleSelector at_a, u32 scale_b,
                                 ScaleSelector at_b) {
    QG_MMA_BLOCK_SCALED("m16n8k64.row.col.kind::mxf4nvf4.block_scale.scale_vec::4X.f32.e2m1.e2m1.f32.ue4m3");
}
// A is E4M3, B is E4M3 or E2M1; one UE8M0 scale
// for the 32 values.
template <bool B_E2M1>
QG_DEVICE void mma_m16n8k32_mxf8(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2], u32 scale_a, ScaleSelector at_a, u32 scale_b,
                                 ScaleSelector at_b) {
    if constexpr (B_E2M1)
        QG_MMA_BLOCK_SCALED("m16n8k32.row.col.kind::mxf8f6f4.block_scale.scale_vec::1X.f32.e4m3.e2m1.f32.ue8m0");
    else
        QG_MMA_BLOCK_SCALED("m16n8k32.row.col.kind::mxf8f6f4.block_scale.scale_vec::1X.f32.e4m3.e4m3.f32.ue8m0");
}
#undef QG_MMA_BLOCK_SCALED
#endif
