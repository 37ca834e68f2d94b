// wgmma with A and B in shared memory.
#pragma once
#include "atoms/wgmma.cuh"

#if QG_VARIANT == 90
QG_DEVICE u64 wgmma_descriptor_128b_mn(const u8* shared, u32 leading_bytes) {
    const u64 start = (shared_address(shared) & 0x3ffffu) >> 4;
    const u64 stride = 1024 >> 4, swizzle_128 = 1;
    return start | (u64)(leading_bytes >> 4) << 16 | stride << 32 | swizzle_128 << 62;
}

template <u32 COLUMNS, u32 A_MN, u32 B_MN>
QG_DEVICE void wgmma_shared_k16_f16(float (&d)[COLUMNS / 2], u64 a_descriptor, u64 b_descriptor, QG_AT) {
    emu->wgmma_shared(d, COLUMNS / 2, a_descriptor, b_descriptor, A_MN, B_MN, 0, 1, file, line);
}
template <u32 COLUMNS, u32 A_MN, u32 B_MN>
QG_DEVICE void wgmma_shared_k16_bf16(float (&d)[COLUMNS / 2], u64 a_descriptor, u64 b_descriptor, QG_AT) {
    emu->wgmma_shared(d, COLUMNS / 2, a_descriptor, b_descriptor, A_MN, B_MN, 1, 1, file, line);
}
#endif
