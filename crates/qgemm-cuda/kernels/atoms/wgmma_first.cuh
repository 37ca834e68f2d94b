// wgmma with scale-d 0: overwrites the accumulators.
// `atoms/wgmma.cuh` has the accumulating form.
#pragma once
#include "atoms/wgmma.cuh"

#if QG_VARIANT == 90
#define QG_WGMMA_FIRST(n, type, places, operands, a, b)                                                                \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " {" places "}, {" a "}, " b          \
                 ", 0, 1, 1, 0;"                                                                                       \
                 : operands                                                                                            \
                 : "r"(a_registers[0]), "r"(a_registers[1]), "r"(a_registers[2]), "r"(a_registers[3]),                 \
                   "l"(b_descriptor))
#define QG_WGMMA_FIRST_OF_COLUMNS(type)                                                                                \
    static_assert(COLUMNS == 32 || COLUMNS == 48 || COLUMNS == 64 || COLUMNS == 96, "few tokens");                     \
    if constexpr (COLUMNS == 32)                                                                                       \
        QG_WGMMA_FIRST(32, type, QG_OPERANDS_16, QG_D16(0), "%16, %17, %18, %19", "%20");                                \
    else if constexpr (COLUMNS == 48)                                                                                  \
        QG_WGMMA_FIRST(48, type, QG_OPERANDS_24, QG_D24(0), "%24, %25, %26, %27", "%28");                                \
    else if constexpr (COLUMNS == 96)                                                                                  \
        QG_WGMMA_FIRST(96, type, QG_OPERANDS_48, QG_D48(0), "%48, %49, %50, %51", "%52");                                \
    else                                                                                                               \
        QG_WGMMA_FIRST(64, type, QG_OPERANDS_32, QG_D32(0), "%32, %33, %34, %35", "%36")

// D[64 rows, COLUMNS] = A · B, K = 16.
template <u32 COLUMNS>
QG_DEVICE void wgmma_first_k16_f16(float (&d)[COLUMNS / 2], const u32 (&a_registers)[4], u64 b_descriptor) {
    QG_WGMMA_FIRST_OF_COLUMNS("f16");
}
template <u32 COLUMNS>
QG_DEVICE void wgmma_first_k16_bf16(float (&d)[COLUMNS / 2], const u32 (&a_registers)[4], u64 b_descriptor) {
    QG_WGMMA_FIRST_OF_COLUMNS("bf16");
}
#endif
