// Asynchronous matrix instructions of a warpgroup that read both factors, words of TF32, from shared memory.
#pragma once
#include "atoms/wgmma.cuh"

#if QG_VARIANT == 90
template <u32 COLUMNS>
QG_DEVICE void wgmma_shared_k8_tf32(float (&d)[COLUMNS / 2], u64 a_descriptor, u64 b_descriptor, QG_AT) {
    emu->wgmma_shared(d, COLUMNS / 2, a_descriptor, b_descriptor, 0, 0, 5, 1, file, line);
}
#endif
