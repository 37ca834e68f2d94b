// wgmma for attention: S = Q · Kᵀ and O += P · V.
// Q and K are in shared memory. P is in
// registers, V is MN-major.
// D, A, fences and groups: see atoms/wgmma.cuh.
// Descriptors: see also atoms/wgmma_shared.cuh.
#pragma once
#include "atoms/wgmma_shared.cuh"

#if QG_VARIANT == 90
// One wgmma of `n` columns. Immediates: scale-d (ADDS), A and
// B not negated, both K-major.
#define QG_WGMMA_SCORES(n, type, places, operands, a, b, adds)                                                         \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " {" places "}, " a ", " b ", " adds  \
                 ", 1, 1, 0, 0;"                                                                                       \
                 : operands                                                                                            \
                 : "l"(a_descriptor), "l"(b_descriptor), "n"(ADDS))
#define QG_WGMMA_SCORES_OF_COLUMNS(type)                                                                               \
    if constexpr (COLUMNS == 64)                                                                                       \
        QG_WGMMA_SCORES(64, type, QG_OPERANDS_32, QG_D32(0), "%32", "%33", "%34");                                       \
    else                                                                                                               \
        QG_WGMMA_SCORES(128, type, QG_OPERANDS_64, QG_D64(0), "%64", "%65", "%66")

// D[64 rows, COLUMNS] = A · B (+= if ADDS is 1)
// over 16 values of k.
// COLUMNS is 64 or 128.
template <u32 COLUMNS, u32 ADDS>
QG_DEVICE void wgmma_scores_k16_f16(float (&d)[COLUMNS / 2], u64 a_descriptor, u64 b_descriptor) {
    QG_WGMMA_SCORES_OF_COLUMNS("f16");
}
template <u32 COLUMNS, u32 ADDS>
QG_DEVICE void wgmma_scores_k16_bf16(float (&d)[COLUMNS / 2], u64 a_descriptor, u64 b_descriptor) {
    QG_WGMMA_SCORES_OF_COLUMNS("bf16");
}

// One wgmma of `n` columns. Immediates: accumulate, A and B
// not negated, B MN-major.
#define QG_WGMMA_VALUES(n, type, places, operands, a, b)                                                               \
    asm volatile("wgmma.mma_async.sync.aligned.m64n" #n "k16.f32." type "." type " {" places "}, {" a "}, " b          \
                 ", 1, 1, 1, 1;"                                                                                       \
                 : operands                                                                                            \
                 : "r"(a_registers[0]), "r"(a_registers[1]), "r"(a_registers[2]), "r"(a_registers[3]),                 \
                   "l"(b_descriptor))
#define QG_WGMMA_VALUES_OF_COLUMNS(type)                                                                               \
    if constexpr (COLUMNS == 64)                                                                                       \
        QG_WGMMA_VALUES(64, type, QG_OPERANDS_32, QG_D32(0), "%32, %33, %34, %35", "%36");                               \
    else if constexpr (COLUMNS == 128)                                                                                 \
        QG_WGMMA_VALUES(128, type, QG_OPERANDS_64, QG_D64(0), "%64, %65, %66, %67", "%68");                              \
    else                                                                                                               \
        QG_WGMMA_VALUES(256, type, QG_OPERANDS_128, QG_D128(0), "%128, %129, %130, %131", "%132")

// D[64 rows, COLUMNS] += A · B over 16 values of k, B MN-major.
// COLUMNS is 64, 128 or 256.
template <u32 COLUMNS>
QG_DEVICE void wgmma_values_k16_f16(float (&d)[COLUMNS / 2], const u32 (&a_registers)[4], u64 b_descriptor) {
    QG_WGMMA_VALUES_OF_COLUMNS("f16");
}
template <u32 COLUMNS>
QG_DEVICE void wgmma_values_k16_bf16(float (&d)[COLUMNS / 2], const u32 (&a_registers)[4], u64 b_descriptor) {
    QG_WGMMA_VALUES_OF_COLUMNS("bf16");
}
#endif
