// The reciprocal of a square root in one instruction.
#pragma once
#include "atoms/types.cuh"

// rsqrt.approx: 1 / sqrt(x) within 2^-22.9 of it. Operands below the normal numbers count as zero.
QG_DEVICE float rsqrt_approx(float x) {
    float d;
    asm("rsqrt.approx.ftz.f32 %0, %1;" : "=f"(d) : "f"(x));
    return d;
}
