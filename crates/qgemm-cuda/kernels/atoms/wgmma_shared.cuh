// wgmma with A and B in shared memory: D += A · B, 64 rows.
// D, fences and groups: see atoms/wgmma.cuh.
//
// K-major operand: values along k are contiguous (descriptor
// in atoms/wgmma.cuh).
// MN-major operand: rows of A, or columns of B, are contiguous.
// 16-bit operands may be either.
#pragma once
#include "atoms/wgmma.cuh"

#if QG_VARIANT == 90
// Descriptor of an MN-major operand with the 128-byte swizzle.
// Each k has 64 values along M or N, 128 bytes.
// Groups of eight k are 1024 bytes apart, groups of 64 values
// along M or N `leading_bytes`.
// The matrix is 1024-byte aligned.
// A step of 16 along k adds 2048 bytes to the address.
QG_DEVICE u64 wgmma_descriptor_128b_mn(const u8* shared, u32 leading_bytes) {
    const u64 start = (shared_address(shared) & 0x3ffffu) >> 4;
    const u64 stride = 1024 >> 4;
    const u64 swizzle_128 = 1;
    return start | (u64)(leading_bytes >> 4) << 16 | stride << 32 | swizzle_128 << 62;
}

// One wgmma of `n` columns. Immediates: accumulate, A and B
// not negated, A_MN, B_MN.
#define QG_WGMMA_SHARED(n, type, places, operands, a, b, a_mn, b_mn)                                                   \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " {" places "}, " a ", " b            \
                 ", 1, 1, 1, " a_mn ", " b_mn ";"                                                                      \
                 : operands                                                                                            \
                 : "l"(a_descriptor), "l"(b_descriptor), "n"(A_MN), "n"(B_MN))
#define QG_WGMMA_SHARED_OF_COLUMNS(type)                                                                               \
    if constexpr (COLUMNS == 64)                                                                                       \
        QG_WGMMA_SHARED(64, type, QG_OPERANDS_32, QG_D32(0), "%32", "%33", "%34", "%35");                                \
    else if constexpr (COLUMNS == 128)                                                                                 \
        QG_WGMMA_SHARED(128, type, QG_OPERANDS_64, QG_D64(0), "%64", "%65", "%66", "%67");                               \
    else                                                                                                               \
        QG_WGMMA_SHARED(256, type, QG_OPERANDS_128, QG_D128(0), "%128", "%129", "%130", "%131")

// D[64 rows, COLUMNS] += A · B over 16 values of k.
// COLUMNS is 64, 128 or 256. A_MN, B_MN: 1 if MN-major.
template <u32 COLUMNS, u32 A_MN, u32 B_MN>
QG_DEVICE void wgmma_shared_k16_f16(float (&d)[COLUMNS / 2], u64 a_descriptor, u64 b_descriptor) {
    QG_WGMMA_SHARED_OF_COLUMNS("f16");
}
template <u32 COLUMNS, u32 A_MN, u32 B_MN>
QG_DEVICE void wgmma_shared_k16_bf16(float (&d)[COLUMNS / 2], u64 a_descriptor, u64 b_descriptor) {
    QG_WGMMA_SHARED_OF_COLUMNS("bf16");
}
#endif
