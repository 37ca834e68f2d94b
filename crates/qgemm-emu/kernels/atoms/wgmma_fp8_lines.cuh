// wgmma with FP8 operands for few columns.
// B may begin anywhere in its lines.
#pragma once
#include "atoms/wgmma_fp8.cuh"

#if QG_VARIANT == 90
template <u32 STRIDE>
QG_DEVICE u64 wgmma_descriptor_lines(const u8* shared) {
    static_assert(STRIDE % 16 == 0, "descriptors count 16 bytes");
    const u64 start = (shared_address(shared) & 0x3ffffu) >> 4;
    const u64 leading = 1, stride = STRIDE >> 4, swizzle_128 = 1;
    return start | leading << 16 | stride << 32 | swizzle_128 << 62;
}

template <u32 COLUMNS, u32 ADDS>
QG_DEVICE void wgmma_few_k32_e4m3_e4m3(float (&d)[COLUMNS / 2], const u32 (&a)[4], u64 b_descriptor, QG_AT) {
    emu->wgmma(d, COLUMNS / 2, a, b_descriptor, 0, 2, ADDS, file, line);
}
template <u32 COLUMNS, u32 ADDS>
QG_DEVICE void wgmma_few_k32_e4m3_e5m2(float (&d)[COLUMNS / 2], const u32 (&a)[4], u64 b_descriptor, QG_AT) {
    emu->wgmma(d, COLUMNS / 2, a, b_descriptor, 0, 3, ADDS, file, line);
}
#endif
