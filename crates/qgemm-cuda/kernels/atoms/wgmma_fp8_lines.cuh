// wgmma with FP8 operands (atoms/wgmma_fp8.cuh) for few columns.
// B may begin anywhere in the 128-byte lines that TMA wrote.
#pragma once
#include "atoms/wgmma_fp8.cuh"

#if QG_VARIANT == 90
// Descriptor of a matrix with the 128-byte swizzle.
// Columns are 128 bytes apart, groups of eight
// columns STRIDE bytes.
// The swizzle XORs address bits 4..6 with bits 7..9, whatever
// the start; it must be a multiple of 16 bytes.
template <u32 STRIDE>
QG_DEVICE u64 wgmma_descriptor_lines(const u8* shared) {
    static_assert(STRIDE % 16 == 0, "descriptors count 16 bytes");
    const u64 start = (shared_address(shared) & 0x3ffffu) >> 4;
    const u64 leading = 1;  // Unused with swizzles.
    const u64 stride = STRIDE >> 4;
    const u64 swizzle_128 = 1;
    return start | leading << 16 | stride << 32 | swizzle_128 << 62;
}

#define QG_OPERANDS_28 QG_OPERANDS_20 ", " QG_EIGHT("2")
#define QG_WGMMA_FP8_OF_FEW_COLUMNS(types)                                                                             \
    if constexpr (COLUMNS == 32)                                                                                       \
        QG_WGMMA_FP8(32, types, QG_OPERANDS_16, QG_D16(0), "%16, %17, %18, %19", "%20", "%21");                          \
    else if constexpr (COLUMNS == 56)                                                                                  \
        QG_WGMMA_FP8(56, types, QG_OPERANDS_28, QG_D24(0) QG_AND QG_D4(24), "%28, %29, %30, %31", "%32", "%33");         \
    else                                                                                                               \
        QG_WGMMA_FP8(64, types, QG_OPERANDS_32, QG_D32(0), "%32, %33, %34, %35", "%36", "%37")
#define QG_AND ,

// D[64 rows, COLUMNS] = A · B (+= if ADDS is 1)
// over 32 values of k.
// COLUMNS is 32, 56 or 64.
template <u32 COLUMNS, u32 ADDS>
QG_DEVICE void wgmma_few_k32_e4m3_e4m3(float (&d)[COLUMNS / 2], const u32 (&a_registers)[4], u64 b_descriptor) {
    QG_WGMMA_FP8_OF_FEW_COLUMNS("e4m3.e4m3");
}
template <u32 COLUMNS, u32 ADDS>
QG_DEVICE void wgmma_few_k32_e4m3_e5m2(float (&d)[COLUMNS / 2], const u32 (&a_registers)[4], u64 b_descriptor) {
    QG_WGMMA_FP8_OF_FEW_COLUMNS("e4m3.e5m2");
}
#endif
