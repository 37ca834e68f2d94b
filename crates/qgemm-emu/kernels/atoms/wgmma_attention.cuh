// wgmma for attention.
#pragma once
#include "atoms/wgmma_shared.cuh"

#if QG_VARIANT == 90
template <u32 COLUMNS, u32 ADDS>
QG_DEVICE void wgmma_scores_k16_f16(float (&d)[COLUMNS / 2], u64 a_descriptor, u64 b_descriptor, QG_AT) {
    emu->wgmma_shared(d, COLUMNS / 2, a_descriptor, b_descriptor, 0, 0, 0, ADDS, file, line);
}
template <u32 COLUMNS, u32 ADDS>
QG_DEVICE void wgmma_scores_k16_bf16(float (&d)[COLUMNS / 2], u64 a_descriptor, u64 b_descriptor, QG_AT) {
    emu->wgmma_shared(d, COLUMNS / 2, a_descriptor, b_descriptor, 0, 0, 1, ADDS, file, line);
}
template <u32 COLUMNS>
QG_DEVICE void wgmma_values_k16_f16(float (&d)[COLUMNS / 2], const u32 (&a)[4], u64 b_descriptor, QG_AT) {
    emu->wgmma(d, COLUMNS / 2, a, b_descriptor, 1, 0, 1, file, line);
}
template <u32 COLUMNS>
QG_DEVICE void wgmma_values_k16_bf16(float (&d)[COLUMNS / 2], const u32 (&a)[4], u64 b_descriptor, QG_AT) {
    emu->wgmma(d, COLUMNS / 2, a, b_descriptor, 1, 1, 1, file, line);
}
#endif
