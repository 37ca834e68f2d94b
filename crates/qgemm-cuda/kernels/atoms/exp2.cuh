// Base-2 exponential and logarithm, one instruction each.
// The error is at most 2^-22, relative or absolute.
// Subnormal operands and results count as zero.
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
