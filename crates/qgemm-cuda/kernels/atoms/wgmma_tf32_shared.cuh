// Asynchronous matrix instructions of a warpgroup that read both factors, words of TF32, from shared memory: D += A · B, 64 rows, 8 values
// of k. The lowest 13 bits of a word do not count: whoever wants numbers rounded to nearest rounds them before. Both factors are K-major
// in the 128-byte swizzle, 32 values to a row; what is said in atoms/wgmma.cuh of descriptors, of D, fences and groups holds here.
#pragma once
#include "atoms/wgmma.cuh"

#if QG_VARIANT == 90
// One instruction for `n` columns. The immediates: accumulate into D, no negation of A and B.
#define QG_WGMMA_TF32_SHARED(n, places, operands, a, b)                                                                \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #n "k8.f32.tf32.tf32 {" places "}, " a ", " b ", 1, 1, 1;"        \
                 : operands                                                                                            \
                 : "l"(a_descriptor), "l"(b_descriptor))

// D[64 rows, COLUMNS] += A · B. COLUMNS is 128 or 256.
template <u32 COLUMNS>
QG_DEVICE void wgmma_shared_k8_tf32(float (&d)[COLUMNS / 2], u64 a_descriptor, u64 b_descriptor) {
    if constexpr (COLUMNS == 128)
        QG_WGMMA_TF32_SHARED(128, QG_PLACES_64, QG_D64(0), "%64", "%65");
    else
        QG_WGMMA_TF32_SHARED(256, QG_PLACES_128, QG_D128(0), "%128", "%129");
}
#endif
