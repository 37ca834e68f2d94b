// wgmma with bytes. Accumulators are words of any type.
#pragma once
#include "atoms/wgmma_fp8.cuh"

#if QG_VARIANT == 90
template <u32 COUNT>
QG_DEVICE void wgmma_fence_accumulators(i32 (&)[COUNT]) {}

template <u32 COLUMNS, u32 ADDS>
QG_DEVICE void wgmma_k32_s8_u8(i32 (&d)[COLUMNS / 2], const u32 (&a)[4], u64 b_descriptor, QG_AT) {
    emu->wgmma(reinterpret_cast<float*>(d), COLUMNS / 2, a, b_descriptor, 0, 4, ADDS, file, line);
}
#endif
