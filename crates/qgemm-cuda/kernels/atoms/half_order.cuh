// f16x2 minimum and maximum, for values ≥ 0 without NaN.
#pragma once
#include "atoms/types.cuh"

#if QG_VARIANT >= 80
QG_DEVICE u32 min_f16x2(u32 a, u32 b) {
    u32 d;
    asm("min.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}
QG_DEVICE u32 max_f16x2(u32 a, u32 b) {
    u32 d;
    asm("max.f16x2 %0, %1, %2;" : "=r"(d) : "r"(a), "r"(b));
    return d;
}
#else
// Nonnegative f16 values order like their bits.
// Older chips have no f16x2 min and max.
QG_DEVICE u32 min_f16x2(u32 a, u32 b) {
    const u32 low = (a & 0xffffu) < (b & 0xffffu) ? a & 0xffffu : b & 0xffffu;
    return low | ((a >> 16) < (b >> 16) ? a & 0xffff0000u : b & 0xffff0000u);
}
QG_DEVICE u32 max_f16x2(u32 a, u32 b) {
    const u32 low = (a & 0xffffu) > (b & 0xffffu) ? a & 0xffffu : b & 0xffffu;
    return low | ((a >> 16) > (b >> 16) ? a & 0xffff0000u : b & 0xffff0000u);
}
#endif
