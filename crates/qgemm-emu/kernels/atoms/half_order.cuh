// f16x2 minimum and maximum, for values ≥ 0 without NaN.
// Such values order like their bits.
#pragma once
#include "atoms/types.cuh"

QG_DEVICE u32 min_f16x2(u32 a, u32 b) {
    const u32 low = (a & 0xffffu) < (b & 0xffffu) ? a & 0xffffu : b & 0xffffu;
    return low | ((a >> 16) < (b >> 16) ? a & 0xffff0000u : b & 0xffff0000u);
}
QG_DEVICE u32 max_f16x2(u32 a, u32 b) {
    const u32 low = (a & 0xffffu) > (b & 0xffffu) ? a & 0xffffu : b & 0xffffu;
    return low | ((a >> 16) > (b >> 16) ? a & 0xffff0000u : b & 0xffff0000u);
}
