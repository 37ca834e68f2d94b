// Approximate reciprocal.
#pragma once
#include "atoms/types.cuh"

// rcp.approx: 1 / x within 1 ulp.
// Subnormal operands and results count as zero.
QG_DEVICE float rcp_approx(float x) {
    float d;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(d) : "f"(x));
    return d;
}
