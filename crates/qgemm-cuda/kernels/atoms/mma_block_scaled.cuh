// Matrix instructions of one warp with FP4 (E2M1) or FP8 operands and scales for blocks along k: D += (A·SA) · (B·SB). They
// exist on sm_120a and sm_121a only: kernels that use them are compiled for the chip itself.
//
// A register holds eight values of neighbouring k, the lowest in its low nibble. With g = lane / 4 and t = lane % 4
// (PTX ISA, "Matrix Fragments for mma.m16n8k64"):
//   A: a0 = (row g, k 8t..8t+7), a1 = (row g+8, k 8t..), a2 = (row g, k 8t+32..), a3 = (row g+8, k 8t+32..)
//   B: b0 = (k 8t..8t+7, column g), b1 = (k 8t+32.., column g)
// Of m16n8k32, whose elements are bytes, fragments are those of `mma_fp8.cuh`; an E2M1 stands in bits 2 to 5 of its byte.
//   D: d0, d1 = (row g, columns 2t, 2t+1), d2, d3 = the same columns of row g+8
// Scales (PTX ISA, "Block Scaling for mma.sync"), with all selectors 0, byte i for the i-th block along k:
//   scale_a: the lane with t = 0 holds those of row g, the lane with t = 1 those of row g+8; other lanes are not read
//   scale_b: the lane with t = 0 holds those of column g
#pragma once
#include "atoms/types.cuh"

#if QG_VARIANT >= 120
// UE8M0 scales, 2^(e - 127), one for 32 values, in the low two bytes.
QG_DEVICE void mma_m16n8k64_mxf4(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2], u32 scale_a, u32 scale_b) {
    asm("mma.sync.aligned.m16n8k64.row.col.kind::mxf4.block_scale.scale_vec::2X.f32.e2m1.e2m1.f32.ue8m0 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3}, {%10}, {0, 0}, {%11}, {0, 0};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(scale_a), "r"(scale_b));
}
// UE4M3 scales, E4M3 numbers without a sign, one for 16 values, in all four bytes.
QG_DEVICE void mma_m16n8k64_nvf4(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2], u32 scale_a, u32 scale_b) {
    asm("mma.sync.aligned.m16n8k64.row.col.kind::mxf4nvf4.block_scale.scale_vec::4X.f32.e2m1.e2m1.f32.ue4m3 "
        "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3}, {%10}, {0, 0}, {%11}, {0, 0};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(scale_a), "r"(scale_b));
}
// A of E4M3 or E2M1, B of E4M3; one UE8M0 scale for all 32 values, byte BYTE of each word.
template <bool A_E2M1, u32 BYTE>
QG_DEVICE void mma_m16n8k32_mxf8(float (&d)[4], const u32 (&a)[4], const u32 (&b)[2], u32 scale_a, u32 scale_b) {
    if constexpr (A_E2M1)
        asm("mma.sync.aligned.m16n8k32.row.col.kind::mxf8f6f4.block_scale.scale_vec::1X.f32.e2m1.e4m3.f32.ue8m0 "
            "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3}, {%10}, {%12, 0}, {%11}, {%12, 0};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(scale_a), "r"(scale_b), "n"(BYTE));
    else
        asm("mma.sync.aligned.m16n8k32.row.col.kind::mxf8f6f4.block_scale.scale_vec::1X.f32.e4m3.e4m3.f32.ue8m0 "
            "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3}, {%10}, {%12, 0}, {%11}, {%12, 0};"
            : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
            : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]), "r"(scale_a), "r"(scale_b), "n"(BYTE));
}
#endif
