// A reciprocal in one instruction.
#pragma once
#include "atoms/types.cuh"

// rcp.approx: 1 / x within one unit in the last place. Results and operands below the normal numbers count as zero.
QG_DEVICE float rcp_approx(float x) {
    float d;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(d) : "f"(x));
    return d;
}
