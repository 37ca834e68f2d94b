// FP8 pair conversions, one instruction each.
// They are separate from numeric.cuh, whose text is the same
// for every chip since Ampere.
#pragma once
#include "atoms/types.cuh"

#if QG_VARIANT >= 89
// cvt.rn.f16x2.e4m3x2: two codes in the low 16 bits to an
// f16 pair, exactly.
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
// cvt.rn.satfinite.e4m3x2.f32: to nearest even, saturating.
// `low` becomes the low byte of 16 bits.
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
