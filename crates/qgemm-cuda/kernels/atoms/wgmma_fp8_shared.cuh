// wgmma with E4M3 A and B in shared memory: D = A ·
// B or D += A · B.
// 64 rows, 32 values of k.
// Both are K-major with the 128-byte swizzle.
// See atoms/wgmma_fp8.cuh and atoms/wgmma.cuh.
#pragma once
#include "atoms/wgmma.cuh"

#if QG_VARIANT == 90
// One wgmma of `n` columns. Immediates: scale-d (ADDS), A
// and B not negated.
#define QG_WGMMA_FP8_SHARED(n, places, operands, a, b, adds)                                                           \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #n "k32.f32.e4m3.e4m3 {" places "}, " a ", " b ", " adds          \
                 ", 1, 1;"                                                                                             \
                 : operands                                                                                            \
                 : "l"(a_descriptor), "l"(b_descriptor), "n"(ADDS))

// D[64 rows, COLUMNS] = A · B (+= if ADDS is 1).
// COLUMNS is 64 or 128.
template <u32 COLUMNS, u32 ADDS>
QG_DEVICE void wgmma_shared_k32_e4m3(float (&d)[COLUMNS / 2], u64 a_descriptor, u64 b_descriptor) {
    if constexpr (COLUMNS == 64)
        QG_WGMMA_FP8_SHARED(64, QG_OPERANDS_32, QG_D32(0), "%32", "%33", "%34");
    else
        QG_WGMMA_FP8_SHARED(128, QG_OPERANDS_64, QG_D64(0), "%64", "%65", "%66");
}
#endif
