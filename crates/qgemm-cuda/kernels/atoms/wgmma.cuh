// wgmma: D += A · B, 64 rows, A in registers, B
// in shared memory.
// It needs sm_90a: kernels are compiled for the chip.
//
// Warp w of the warpgroup has rows 16w..16w+15.
// In these rows, with g = lane/4, t = lane%4 (PTX ISA,
// "Register Fragments and Shared Memory Matrix
// Layouts" of wgmma):
//   A: as in mma.m16n8k16:
//      (row, k): a0 (g, 2t..2t+1), a1 (g+8, 2t..)
//                a2 (g, 2t+8..), a3 (g+8, 2t+8..)
//   D: for each j of eight columns:
//      d[4j], d[4j+1]: row g, columns 8j+2t, 8j+2t+1
//      d[4j+2], d[4j+3]: row g+8
//   B: K-major, in the swizzle of the descriptor
#pragma once
#include "atoms/shared_address.cuh"

#if QG_VARIANT == 90
// Required before the first wgmma, and after any other write
// to A or D registers.
QG_DEVICE void wgmma_fence() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}
// Compiler fence, no instruction: operand registers are
// computed before this point. Otherwise the compiler may
// serialize the wgmmas to order them (ptxas C7520).
QG_DEVICE void wgmma_fence_operand(u32 (&a)[4]) {
    asm volatile("" : "+r"(a[0]), "+r"(a[1]), "+r"(a[2]), "+r"(a[3])::"memory");
}
// Compiler fence, no instruction: accumulator writes stay
// before this point, reads after it.
template <u32 COUNT>
QG_DEVICE void wgmma_fence_accumulators(float (&d)[COUNT]) {
#pragma unroll
    for (u32 i = 0; i < COUNT; i++) asm volatile("" : "+f"(d[i])::"memory");
}
// Closes the group of wgmmas issued since the last commit.
QG_DEVICE void wgmma_commit_group() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}
// Waits until at most N groups are in flight.
// Registers of completed groups may then be used.
template <u32 N>
QG_DEVICE void wgmma_wait_group() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(N) : "memory");
}

// Descriptor of a K-major matrix with the 128-byte swizzle
// (PTX ISA, "Matrix Descriptor Format").
// A column has 128 bytes along k, i.e. 64 values of 16 bits.
// Groups of eight columns are 1024 bytes apart.
// The swizzle moves 16-byte chunk u of column c to u ^ (c % 8).
// The matrix is 1024-byte aligned.
// A step along k inside the 128 bytes adds its
// bytes to the address.
QG_DEVICE u64 wgmma_descriptor_128b(const u8* shared) {
    const u64 start = (shared_address(shared) & 0x3ffffu) >> 4;
    const u64 leading = 1;  // Unused with swizzles.
    const u64 stride = 1024 >> 4;
    const u64 swizzle_128 = 1;
    return start | leading << 16 | stride << 32 | swizzle_128 << 62;
}

// D registers as asm operands, and their names in the text:
// QG_TEN("1") is "%10, %11, … %19".
#define QG_D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define QG_D8(i) QG_D4(i), QG_D4(i + 4)
#define QG_D16(i) QG_D8(i), QG_D8(i + 8)
#define QG_D32(i) QG_D16(i), QG_D16(i + 16)
#define QG_D64(i) QG_D32(i), QG_D32(i + 32)
#define QG_D24(i) QG_D16(i), QG_D8(i + 16)
#define QG_D48(i) QG_D32(i), QG_D16(i + 32)
#define QG_D72(i) QG_D64(i), QG_D8(i + 64)
#define QG_D128(i) QG_D64(i), QG_D64(i + 64)
#define QG_TWO(t, a, b) "%" t #a ", %" t #b
#define QG_FOUR(t, a, b, c, e) QG_TWO(t, a, b) ", " QG_TWO(t, c, e)
#define QG_EIGHT(t) QG_FOUR(t, 0, 1, 2, 3) ", " QG_FOUR(t, 4, 5, 6, 7)
#define QG_TEN(t) QG_EIGHT(t) ", " QG_TWO(t, 8, 9)
#define QG_OPERANDS_4 QG_FOUR("", 0, 1, 2, 3)
#define QG_OPERANDS_8 QG_EIGHT("")
#define QG_OPERANDS_16 QG_TEN("") ", " QG_FOUR("1", 0, 1, 2, 3) ", " QG_TWO("1", 4, 5)
#define QG_OPERANDS_20 QG_TEN("") ", " QG_TEN("1")
#define QG_OPERANDS_24 QG_OPERANDS_20 ", " QG_FOUR("2", 0, 1, 2, 3)
#define QG_OPERANDS_30 QG_TEN("") ", " QG_TEN("1") ", " QG_TEN("2")
#define QG_OPERANDS_32 QG_OPERANDS_30 ", " QG_TWO("3", 0, 1)
#define QG_OPERANDS_48 QG_OPERANDS_30 ", " QG_TEN("3") ", " QG_EIGHT("4")
#define QG_OPERANDS_60 QG_OPERANDS_30 ", " QG_TEN("3") ", " QG_TEN("4") ", " QG_TEN("5")
#define QG_OPERANDS_64 QG_OPERANDS_60 ", " QG_FOUR("6", 0, 1, 2, 3)
#define QG_OPERANDS_72 QG_OPERANDS_60 ", " QG_TEN("6") ", " QG_TWO("7", 0, 1)
#define QG_OPERANDS_90 QG_OPERANDS_60 ", " QG_TEN("6") ", " QG_TEN("7") ", " QG_TEN("8")
#define QG_OPERANDS_120 QG_OPERANDS_90 ", " QG_TEN("9") ", " QG_TEN("10") ", " QG_TEN("11")
#define QG_OPERANDS_128 QG_OPERANDS_120 ", " QG_EIGHT("12")

// One wgmma of `n` columns. Operands: D, A, B's descriptor.
// Immediates: accumulate, A and B not negated, B not transposed.
#define QG_WGMMA(n, type, places, operands, a, b)                                                                      \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " {" places "}, {" a "}, " b          \
                 ", 1, 1, 1, 0;"                                                                                       \
                 : operands                                                                                            \
                 : "r"(a_registers[0]), "r"(a_registers[1]), "r"(a_registers[2]), "r"(a_registers[3]),                 \
                   "l"(b_descriptor))
#define QG_WGMMA_OF_COLUMNS(type)                                                                                      \
    if constexpr (COLUMNS == 8)                                                                                        \
        QG_WGMMA(8, type, QG_OPERANDS_4, QG_D4(0), "%4, %5, %6, %7", "%8");                                              \
    else if constexpr (COLUMNS == 16)                                                                                  \
        QG_WGMMA(16, type, QG_OPERANDS_8, QG_D8(0), "%8, %9, %10, %11", "%12");                                          \
    else if constexpr (COLUMNS == 32)                                                                                  \
        QG_WGMMA(32, type, QG_OPERANDS_16, QG_D16(0), "%16, %17, %18, %19", "%20");                                      \
    else if constexpr (COLUMNS == 64)                                                                                  \
        QG_WGMMA(64, type, QG_OPERANDS_32, QG_D32(0), "%32, %33, %34, %35", "%36");                                      \
    else if constexpr (COLUMNS == 128)                                                                                 \
        QG_WGMMA(128, type, QG_OPERANDS_64, QG_D64(0), "%64, %65, %66, %67", "%68");                                     \
    else if constexpr (COLUMNS == 48)                                                                                 \
        QG_WGMMA(48, type, QG_OPERANDS_24, QG_D24(0), "%24, %25, %26, %27", "%28");                                     \
    else if constexpr (COLUMNS == 96)                                                                                 \
        QG_WGMMA(96, type, QG_OPERANDS_48, QG_D48(0), "%48, %49, %50, %51", "%52");                                     \
    else if constexpr (COLUMNS == 144)                                                                                \
        QG_WGMMA(144, type, QG_OPERANDS_72, QG_D72(0), "%72, %73, %74, %75", "%76");                                    \
    else                                                                                                               \
        QG_WGMMA(256, type, QG_OPERANDS_128, QG_D128(0), "%128, %129, %130, %131", "%132")

// D[64 rows, COLUMNS] += A · B over 16 values of k.
// COLUMNS is one of the sizes above.
template <u32 COLUMNS>
QG_DEVICE void wgmma_k16_f16(float (&d)[COLUMNS / 2], const u32 (&a_registers)[4], u64 b_descriptor) {
    QG_WGMMA_OF_COLUMNS("f16");
}
template <u32 COLUMNS>
QG_DEVICE void wgmma_k16_bf16(float (&d)[COLUMNS / 2], const u32 (&a_registers)[4], u64 b_descriptor) {
    QG_WGMMA_OF_COLUMNS("bf16");
}
#endif
