// wgmma with FP8 operands: D = A · B or D += A · B
// over 32 values of k.
// 64 rows, A in registers, B in shared memory.
// Fences and groups: see atoms/wgmma.cuh.
//
// A register of A holds four values along k, lowest byte first.
// In the 16 rows of a warp, with g = lane/4, t = lane%4
// (PTX ISA, "Register Fragments and Shared Memory Matrix
// Layouts" of wgmma):
//   A: as in mma.m16n8k32:
//      (row, k): a0 (g, 4t..4t+3), a1 (g+8, 4t..)
//                a2 (g, 4t+16..), a3 (g+8, 4t+16..)
//   D: as with 16-bit operands
//   B: K-major, the only order of 8-bit operands
// Hopper's tensor cores keep about 14 bits of a sum inside the
// instruction. Promote long sums to f32 often.
#pragma once
#include "atoms/wgmma.cuh"

#if QG_VARIANT == 90
// Descriptor of a K-major matrix with the 64-byte swizzle (PTX
// ISA, "Matrix Descriptor Format").
// A column has 64 bytes along k.
// Groups of eight columns are 512 bytes apart.
// The swizzle moves 16-byte chunk u of column c to
// u ^ (c / 2 % 4).
// The matrix is 512-byte aligned.
// A step along k inside the 64 bytes adds its
// bytes to the address.
QG_DEVICE u64 wgmma_descriptor_64b(const u8* shared) {
    const u64 start = (shared_address(shared) & 0x3ffffu) >> 4;
    const u64 leading = 1;  // Unused with swizzles.
    const u64 stride = 512 >> 4;
    const u64 swizzle_64 = 2;
    return start | leading << 16 | stride << 32 | swizzle_64 << 62;
}

// One wgmma of `n` columns. Operands: D, A, B's descriptor.
// Immediates: scale-d (ADDS), A and B not negated.
#define QG_WGMMA_FP8(n, types, places, operands, a, b, adds)                                                           \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #n "k32.f32." types " {" places "}, {" a "}, " b ", " adds        \
                 ", 1, 1;"                                                                                             \
                 : operands                                                                                            \
                 : "r"(a_registers[0]), "r"(a_registers[1]), "r"(a_registers[2]), "r"(a_registers[3]),                 \
                   "l"(b_descriptor), "n"(ADDS))
#define QG_WGMMA_FP8_OF_COLUMNS(types)                                                                                 \
    if constexpr (COLUMNS == 64)                                                                                       \
        QG_WGMMA_FP8(64, types, QG_OPERANDS_32, QG_D32(0), "%32, %33, %34, %35", "%36", "%37");                          \
    else                                                                                                               \
        QG_WGMMA_FP8(128, types, QG_OPERANDS_64, QG_D64(0), "%64, %65, %66, %67", "%68", "%69")

// D[64 rows, COLUMNS] = A · B (+= if ADDS is 1)
// over 32 values of k.
// COLUMNS is 64 or 128.
template <u32 COLUMNS, u32 ADDS>
QG_DEVICE void wgmma_k32_e4m3_e4m3(float (&d)[COLUMNS / 2], const u32 (&a_registers)[4], u64 b_descriptor) {
    QG_WGMMA_FP8_OF_COLUMNS("e4m3.e4m3");
}
template <u32 COLUMNS, u32 ADDS>
QG_DEVICE void wgmma_k32_e4m3_e5m2(float (&d)[COLUMNS / 2], const u32 (&a_registers)[4], u64 b_descriptor) {
    QG_WGMMA_FP8_OF_COLUMNS("e4m3.e5m2");
}
#endif
