// wgmma. Accumulators are NaN until the wait.
#pragma once
#include "atoms/shared_address.cuh"

#if QG_VARIANT == 90
QG_DEVICE void wgmma_fence() { emu->wgmma_fence(); }
QG_DEVICE void wgmma_fence_operand(u32 (&)[4]) {}
template <u32 COUNT>
QG_DEVICE void wgmma_fence_accumulators(float (&)[COUNT]) {}
QG_DEVICE void wgmma_commit_group() { emu->wgmma_commit(); }
template <u32 N>
QG_DEVICE void wgmma_wait_group(QG_AT) {
    emu->wgmma_wait(N, file, line);
}

QG_DEVICE u64 wgmma_descriptor_128b(const u8* shared) {
    const u64 start = (shared_address(shared) & 0x3ffffu) >> 4;
    const u64 leading = 1, stride = 1024 >> 4, swizzle_128 = 1;
    return start | leading << 16 | stride << 32 | swizzle_128 << 62;
}

template <u32 COLUMNS>
QG_DEVICE void wgmma_k16_f16(float (&d)[COLUMNS / 2], const u32 (&a)[4], u64 b_descriptor, QG_AT) {
    emu->wgmma(d, COLUMNS / 2, a, b_descriptor, 0, 0, 1, file, line);
}
template <u32 COLUMNS>
QG_DEVICE void wgmma_k16_bf16(float (&d)[COLUMNS / 2], const u32 (&a)[4], u64 b_descriptor, QG_AT) {
    emu->wgmma(d, COLUMNS / 2, a, b_descriptor, 0, 1, 1, file, line);
}
#endif
