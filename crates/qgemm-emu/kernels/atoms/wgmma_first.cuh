// wgmma with scale-d 0, for a first k-step.
#pragma once
#include "atoms/wgmma.cuh"

#if QG_VARIANT == 90
template <u32 COLUMNS>
QG_DEVICE void wgmma_first_k16_f16(float (&d)[COLUMNS / 2], const u32 (&a)[4], u64 b_descriptor, QG_AT) {
    for (u32 i = 0; i < COLUMNS / 2; i++) d[i] = 0.0f;
    emu->wgmma(d, COLUMNS / 2, a, b_descriptor, 0, 0, 1, file, line);
}
template <u32 COLUMNS>
QG_DEVICE void wgmma_first_k16_bf16(float (&d)[COLUMNS / 2], const u32 (&a)[4], u64 b_descriptor, QG_AT) {
    for (u32 i = 0; i < COLUMNS / 2; i++) d[i] = 0.0f;
    emu->wgmma(d, COLUMNS / 2, a, b_descriptor, 0, 1, 1, file, line);
}
#endif
