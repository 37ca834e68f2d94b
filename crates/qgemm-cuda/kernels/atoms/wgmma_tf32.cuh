// wgmma with TF32 operands: D += A · B over k8, 64 rows.
// A is in registers, B in shared memory.
// The low 13 bits of a word are ignored:
// round to nearest beforehand if needed.
// A as in mma.m16n8k8: (row g, k t), (row g+8, k t), (row g, k
// t+4), (row g+8, k t+4).
// B is K-major with the 128-byte swizzle, 32 values a row.
// Descriptors, D, fences and groups: see atoms/wgmma.cuh.
#pragma once
#include "atoms/wgmma.cuh"

#if QG_VARIANT == 90
// One wgmma of `n` columns. Immediates: accumulate, A
// and B not negated.
#define QG_WGMMA_TF32(n, places, operands, a, b)                                                                       \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #n "k8.f32.tf32.tf32 {" places "}, {" a "}, " b ", 1, 1, 1;"      \
                 : operands                                                                                            \
                 : "r"(a_registers[0]), "r"(a_registers[1]), "r"(a_registers[2]), "r"(a_registers[3]),                 \
                   "l"(b_descriptor))

// D[64 rows, COLUMNS] += A · B.
// COLUMNS is 128 or 256.
template <u32 COLUMNS>
QG_DEVICE void wgmma_k8_tf32(float (&d)[COLUMNS / 2], const u32 (&a_registers)[4], u64 b_descriptor) {
    if constexpr (COLUMNS == 128)
        QG_WGMMA_TF32(128, QG_OPERANDS_64, QG_D64(0), "%64, %65, %66, %67", "%68");
    else
        QG_WGMMA_TF32(256, QG_OPERANDS_128, QG_D128(0), "%128, %129, %130, %131", "%132");
}
#endif
