// Asynchronous matrix instructions of a warpgroup on 8-bit floating-point operands: D = A · B, or D += A · B, 64 rows, A
// in registers, B in shared memory, 32 values of k. What is said of fences and groups in atoms/wgmma.cuh holds here.
//
// A register of A holds four values of neighbouring k, the lowest in its low byte; with g = lane / 4 and t = lane % 4
// (PTX ISA, "Register Fragments and Shared Memory Matrix Layouts" of wgmma), in the 16 rows of a warp:
//   A: as in mma.m16n8k32: a0 = (row g, k 4t..4t+3), a1 = (row g+8, k 4t..), a2 = (row g, k 4t+16..), a3 = row g+8's
//   D: as with operands of 16 bits
//   B: K-major: 8-bit operands have no other order
// Hopper's tensor cores keep about 14 bits of a sum inside the instruction, so long sums must be promoted to f32 often.
#pragma once
#include "atoms/wgmma.cuh"

#if QG_VARIANT == 90
// Descriptor of a matrix in shared memory (PTX ISA, "Matrix Descriptor Format"): columns of 64 bytes along k, 512 bytes
// from one group of eight columns to the next, in the 64-byte swizzle that TMA writes: the 16-byte chunk u of column c
// stands at u ^ (c / 2 % 4). The matrix begins at a multiple of 512 bytes. A step along k within its 64 bytes adds as
// many bytes to the address.
QG_DEVICE u64 wgmma_descriptor_64b(const u8* shared) {
    const u64 start = (shared_address(shared) & 0x3ffffu) >> 4;
    const u64 leading = 1;  // Not used with swizzles.
    const u64 stride = 512 >> 4;
    const u64 swizzle_64 = 2;
    return start | leading << 16 | stride << 32 | swizzle_64 << 62;
}

// One instruction for `n` columns. The operands are D, A, B's descriptor, whether it adds to D, and immediates: no
// negation of A and B.
#define QG_WGMMA_FP8(n, types, places, operands, a, b, adds)                                                           \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #n "k32.f32." types " {" places "}, {" a "}, " b ", " adds        \
                 ", 1, 1;"                                                                                             \
                 : operands                                                                                            \
                 : "r"(a_registers[0]), "r"(a_registers[1]), "r"(a_registers[2]), "r"(a_registers[3]),                 \
                   "l"(b_descriptor), "n"(ADDS))
#define QG_WGMMA_FP8_OF_COLUMNS(types)                                                                                 \
    if constexpr (COLUMNS == 64)                                                                                       \
        QG_WGMMA_FP8(64, types, QG_PLACES_32, QG_D32(0), "%32, %33, %34, %35", "%36", "%37");                          \
    else                                                                                                               \
        QG_WGMMA_FP8(128, types, QG_PLACES_64, QG_D64(0), "%64, %65, %66, %67", "%68", "%69")

// D[64 rows, COLUMNS] = A · B, or += where ADDS is 1, over 32 values of k. COLUMNS is 64 or 128.
template <u32 COLUMNS, u32 ADDS>
QG_DEVICE void wgmma_k32_e4m3_e4m3(float (&d)[COLUMNS / 2], const u32 (&a_registers)[4], u64 b_descriptor) {
    QG_WGMMA_FP8_OF_COLUMNS("e4m3.e4m3");
}
template <u32 COLUMNS, u32 ADDS>
QG_DEVICE void wgmma_k32_e4m3_e5m2(float (&d)[COLUMNS / 2], const u32 (&a_registers)[4], u64 b_descriptor) {
    QG_WGMMA_FP8_OF_COLUMNS("e4m3.e5m2");
}
#endif
