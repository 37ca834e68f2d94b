// Conversions between pairs of FP8 numbers and wider ones: one instruction each. They have a file of their own so that
// numeric.cuh is the same text for every chip from Ampere on.
#pragma once
#include "atoms/types.cuh"

#if QG_VARIANT >= 89
// cvt.rn.f16x2.e4m3x2: two numbers in the low 16 bits to an f16 pair, exactly.
QG_DEVICE u32 cvt_f16x2_e4m3x2(u32 pair) {
    u32 d;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(d) : "h"((u16)pair));
    return d;
}
QG_DEVICE u32 cvt_f16x2_e5m2x2(u32 pair) {
    u32 d;
    asm("cvt.rn.f16x2.e5m2x2 %0, %1;" : "=r"(d) : "h"((u16)pair));
    return d;
}
// cvt.rn.satfinite.e4m3x2.f32: rounds to nearest even; numbers beyond the largest become the largest. `low` goes to the
// low byte of 16 bits.
QG_DEVICE u32 cvt_e4m3x2_f32(float high, float low) {
    u16 d;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(d) : "f"(high), "f"(low));
    return d;
}
QG_DEVICE u32 cvt_e5m2x2_f32(float high, float low) {
    u16 d;
    asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(d) : "f"(high), "f"(low));
    return d;
}
#endif
