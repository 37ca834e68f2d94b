// Warp maximum, for all lanes.
#pragma once
#include "atoms/warp.cuh"

QG_DEVICE u32 warp_max(u32 value) {
#if QG_VARIANT >= 80
    return redux_max_u32(value);
#else
#pragma unroll
    for (u32 mask = 16; mask > 0; mask /= 2) {
        const u32 other = shfl_xor_u32(value, mask);
        value = other > value ? other : value;
    }
    return value;
#endif
}
