// wgmma with FP8 operands, B in shared memory.
#pragma once
#include "atoms/wgmma.cuh"

#if QG_VARIANT == 90
QG_DEVICE u64 wgmma_descriptor_64b(const u8* shared) {
    const u64 start = (shared_address(shared) & 0x3ffffu) >> 4;
    const u64 leading = 1, stride = 512 >> 4, swizzle_64 = 2;
    return start | leading << 16 | stride << 32 | swizzle_64 << 62;
}

template <u32 COLUMNS, u32 ADDS>
QG_DEVICE void wgmma_k32_e4m3_e4m3(float (&d)[COLUMNS / 2], const u32 (&a)[4], u64 b_descriptor, QG_AT) {
    emu->wgmma(d, COLUMNS / 2, a, b_descriptor, 0, 2, ADDS, file, line);
}
template <u32 COLUMNS, u32 ADDS>
QG_DEVICE void wgmma_k32_e4m3_e5m2(float (&d)[COLUMNS / 2], const u32 (&a)[4], u64 b_descriptor, QG_AT) {
    emu->wgmma(d, COLUMNS / 2, a, b_descriptor, 0, 3, ADDS, file, line);
}
#endif
