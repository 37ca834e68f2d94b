// wgmma with s8 A and s8 B.
#pragma once
#include "atoms/wgmma_s8.cuh"

#if QG_VARIANT == 90
template <u32 COLUMNS, u32 ADDS>
QG_DEVICE void wgmma_k32_s8_s8(i32 (&d)[COLUMNS / 2], const u32 (&a)[4], u64 b_descriptor, QG_AT) {
    emu->wgmma(reinterpret_cast<float*>(d), COLUMNS / 2, a, b_descriptor, 0, 6, ADDS, file, line);
}
#endif
