// wgmma with TF32 operands, B in shared memory.
#pragma once
#include "atoms/wgmma.cuh"

#if QG_VARIANT == 90
template <u32 COLUMNS>
QG_DEVICE void wgmma_k8_tf32(float (&d)[COLUMNS / 2], const u32 (&a)[4], u64 b_descriptor, QG_AT) {
    emu->wgmma(d, COLUMNS / 2, a, b_descriptor, 0, 5, 1, file, line);
}
#endif
