// wgmma with E4M3 A and B in shared memory.
#pragma once
#include "atoms/wgmma.cuh"

#if QG_VARIANT == 90
template <u32 COLUMNS, u32 ADDS>
QG_DEVICE void wgmma_shared_k32_e4m3(float (&d)[COLUMNS / 2], u64 a_descriptor, u64 b_descriptor, QG_AT) {
    emu->wgmma_shared(d, COLUMNS / 2, a_descriptor, b_descriptor, 0, 0, 2, ADDS, file, line);
}
#endif
