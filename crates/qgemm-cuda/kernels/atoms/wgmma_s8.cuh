// wgmma with bytes: D = A · B or D += A · B, 64
// rows, 32 values of k.
// A is s8 in registers, B is u8 in shared memory.
// 32-bit sums wrap around.
// Fences and groups: see atoms/wgmma.cuh.
// A, B and the descriptor: see atoms/wgmma_fp8.cuh.
#pragma once
#include "atoms/wgmma_fp8.cuh"

#if QG_VARIANT == 90
template <u32 COUNT>
QG_DEVICE void wgmma_fence_accumulators(i32 (&d)[COUNT]) {
#pragma unroll
    for (u32 i = 0; i < COUNT; i++) asm volatile("" : "+r"(d[i])::"memory");
}

#define QG_I4(i) "+r"(d[i]), "+r"(d[i + 1]), "+r"(d[i + 2]), "+r"(d[i + 3])
#define QG_I8(i) QG_I4(i), QG_I4(i + 4)
#define QG_I16(i) QG_I8(i), QG_I8(i + 8)
#define QG_I32(i) QG_I16(i), QG_I16(i + 16)
#define QG_I64(i) QG_I32(i), QG_I32(i + 32)

// One wgmma of `n` columns.
// Operands: D, A, B's descriptor, scale-d (ADDS).
#define QG_WGMMA_S8(n, places, operands, a, b, adds)                                                                   \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #n "k32.s32.s8.u8 {" places "}, {" a "}, " b ", " adds ";"       \
                 : operands                                                                                            \
                 : "r"(a_registers[0]), "r"(a_registers[1]), "r"(a_registers[2]), "r"(a_registers[3]),                 \
                   "l"(b_descriptor), "n"(ADDS))

// D[64 rows, COLUMNS] = A · B (+= if ADDS is 1)
// over 32 values of k.
// COLUMNS is 64 or 128.
template <u32 COLUMNS, u32 ADDS>
QG_DEVICE void wgmma_k32_s8_u8(i32 (&d)[COLUMNS / 2], const u32 (&a_registers)[4], u64 b_descriptor) {
    if constexpr (COLUMNS == 64)
        QG_WGMMA_S8(64, QG_OPERANDS_32, QG_I32(0), "%32, %33, %34, %35", "%36", "%37");
    else
        QG_WGMMA_S8(128, QG_OPERANDS_64, QG_I64(0), "%64, %65, %66, %67", "%68", "%69");
}
#endif
