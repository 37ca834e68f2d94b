// Matrix instructions of one warp with FP4 (E2M1) or FP8 operands and scales for blocks along k: D += (A·SA) · (B·SB). They
// exist on sm_120a and sm_121a only: kernels that use them are compiled for the chip itself.
//
// A register holds eight values of neighbouring k, the lowest in its low nibble. With g = lane / 4 and t = lane % 4
// (PTX ISA, "Matrix Fragments for mma.m16n8k64"):
//   A: a0 = (row g, k 8t..8t+7), a1 = (row g+8, k 8t..), a2 = (row g, k 8t+32..), a3 = (row g+8, k 8t+32..)
//   B: b0 = (k 8t..8t+7, column g), b1 = (k 8t+32.., column g)
// Of m16n8k32, whose elements are bytes, fragments are those of `mma_fp8.cuh`; an E2M1 stands in bits 2 to 5 of its byte.
//   D: d0, d1 = (row g, columns 2t, 2t+1), d2, d3 = the same columns of row g+8
// Scales (PTX ISA, "Block Scaling for mma.sync"), byte `byte` + i of a word for the i-th block along k:
//   scale_a: the lane with t = 2 · thread holds those of row g, the lane with t = 2 · thread + 1 those of row g+8
//   scale_b: the lane with t = thread holds those of column g
// Other lanes' words are not read. Bytes and threads are constants.
#pragma once
#include "atoms/types.cuh"

#if QG_VARIANT >= 120
// Which bytes of which lanes hold the scales of an operand; `thread` is 0 or 1.
struct ScalePlace {
    u32 byte, thread;
};

#define QG_MMA_BLOCK_SCALED(SHAPE_AND_TYPES)                                                                           \
    asm("mma.sync.aligned." SHAPE_AND_TYPES                                                                            \
        " {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3}, {%10}, {%11, %12}, {%13}, {%14, %15};"       \
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])                                                               \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(scale_a), "h"((u16)at_a.byte),         \
          "h"((u16)at_a.thread), "r"(scale_b), "h"((u16)at_b.byte), "h"((u16)at_b.thread))

// UE8M0 scales, 2^(e - 127), one for 32 values: bytes 0 and 1, or 2 and 3.
QG_DEVICE void mma_m16n8k64_mxf4(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2], u32 scale_a, ScalePlace at_a, u32 scale_b,
                                 ScalePlace at_b) {
    QG_MMA_BLOCK_SCALED("m16n8k64.row.col.kind::mxf4.block_scale.scale_vec::2X.f32.e2m1.e2m1.f32.ue8m0");
}
// UE4M3 scales, E4M3 numbers without a sign, one for 16 values: all four bytes.
QG_DEVICE void mma_m16n8k64_nvf4(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2], u32 scale_a, ScalePlace at_a, u32 scale_b,
                                 ScalePlace at_b) {
    QG_MMA_BLOCK_SCALED("m16n8k64.row.col.kind::mxf4nvf4.block_scale.scale_vec::4X.f32.e2m1.e2m1.f32.ue4m3");
}
// A of E4M3, B of E4M3 or E2M1; one UE8M0 scale for all 32 values.
template <bool B_E2M1>
QG_DEVICE void mma_m16n8k32_mxf8(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2], u32 scale_a, ScalePlace at_a, u32 scale_b,
                                 ScalePlace at_b) {
    if constexpr (B_E2M1)
        QG_MMA_BLOCK_SCALED("m16n8k32.row.col.kind::mxf8f6f4.block_scale.scale_vec::1X.f32.e4m3.e2m1.f32.ue8m0");
    else
        QG_MMA_BLOCK_SCALED("m16n8k32.row.col.kind::mxf8f6f4.block_scale.scale_vec::1X.f32.e4m3.e4m3.f32.ue8m0");
}
#undef QG_MMA_BLOCK_SCALED
#endif
