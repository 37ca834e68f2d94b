// Approximate reciprocal square root.
#pragma once
#include "atoms/types.cuh"

// rsqrt.approx: 1 / sqrt(x), relative error at most 2^-22.9.
// Subnormal operands count as zero.
QG_DEVICE float rsqrt_approx(float x) {
    float d;
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(d) : "f"(x));
    return d;
}
