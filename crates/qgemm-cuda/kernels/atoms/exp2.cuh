// Powers and logarithms to base 2: one instruction each, within 2^-22 of the value or of 1. Results and operands below the
// normal numbers count as zero.
#pragma once
#include "atoms/types.cuh"

QG_DEVICE float ex2_approx(float x) {
    float d;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(d) : "f"(x));
    return d;
}
QG_DEVICE float lg2_approx(float x) {
    float d;
    asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(d) : "f"(x));
    return d;
}
