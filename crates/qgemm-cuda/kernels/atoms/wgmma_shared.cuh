// Asynchronous matrix instructions of a warpgroup that read both factors from shared memory: D += A · B, 64 rows. What
// is said of D, fences and groups in atoms/wgmma.cuh holds here.
//
// A factor is K-major when its values along k are contiguous (atoms/wgmma.cuh has the descriptor), and MN-major when those
// along its outer index are: rows of A, columns of B. Factors of 16 bits may be either.
#pragma once
#include "atoms/wgmma.cuh"

#if QG_VARIANT == 90
// Descriptor of an MN-major factor in the 128-byte swizzle that TMA writes: for each k 64 values of the outer index, 128
// bytes; eight k lie 1024 bytes from the next eight, and the next 64 of the outer index `leading_bytes` bytes further on.
// The matrix begins at a multiple of 1024 bytes. A step of 16 along k adds 2048 bytes to the address.
QG_DEVICE u64 wgmma_descriptor_128b_mn(const u8* shared, u32 leading_bytes) {
    const u64 start = (shared_address(shared) & 0x3ffffu) >> 4;
    const u64 stride = 1024 >> 4;
    const u64 swizzle_128 = 1;
    return start | (u64)(leading_bytes >> 4) << 16 | stride << 32 | swizzle_128 << 62;
}

// One instruction for `n` columns. The immediates: accumulate into D, no negation of A and B, which factors are MN-major.
#define QG_WGMMA_SHARED(n, type, places, operands, a, b, a_mn, b_mn)                                                   \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " {" places "}, " a ", " b            \
                 ", 1, 1, 1, " a_mn ", " b_mn ";"                                                                      \
                 : operands                                                                                            \
                 : "l"(a_descriptor), "l"(b_descriptor), "n"(A_MN), "n"(B_MN))
#define QG_WGMMA_SHARED_OF_COLUMNS(type)                                                                               \
    if constexpr (COLUMNS == 64)                                                                                       \
        QG_WGMMA_SHARED(64, type, QG_PLACES_32, QG_D32(0), "%32", "%33", "%34", "%35");                                \
    else if constexpr (COLUMNS == 128)                                                                                 \
        QG_WGMMA_SHARED(128, type, QG_PLACES_64, QG_D64(0), "%64", "%65", "%66", "%67");                               \
    else                                                                                                               \
        QG_WGMMA_SHARED(256, type, QG_PLACES_128, QG_D128(0), "%128", "%129", "%130", "%131")

// D[64 rows, COLUMNS] += A · B over 16 values of k. COLUMNS is 64, 128 or 256; A_MN and B_MN are 1 for MN-major factors.
template <u32 COLUMNS, u32 A_MN, u32 B_MN>
QG_DEVICE void wgmma_shared_k16_f16(float (&d)[COLUMNS / 2], u64 a_descriptor, u64 b_descriptor) {
    QG_WGMMA_SHARED_OF_COLUMNS("f16");
}
template <u32 COLUMNS, u32 A_MN, u32 B_MN>
QG_DEVICE void wgmma_shared_k16_bf16(float (&d)[COLUMNS / 2], u64 a_descriptor, u64 b_descriptor) {
    QG_WGMMA_SHARED_OF_COLUMNS("bf16");
}
#endif
