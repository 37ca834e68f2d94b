// f32 operations that the compiler must not fuse;
// each rounds once.
#pragma once
#include "atoms/types.cuh"

// mul.rn.f32.
QG_DEVICE float mul_rn_f32(float a, float b) {
    float d;
    asm("mul.rn.f32 %0, %1, %2;" : "=f"(d) : "f"(a), "f"(b));
    return d;
}

// div.rn.f32.
QG_DEVICE float div_rn_f32(float a, float b) {
    float d;
    asm("div.rn.f32 %0, %1, %2;" : "=f"(d) : "f"(a), "f"(b));
    return d;
}

// rcp.rn.f32: 1 / a.
QG_DEVICE float rcp_rn_f32(float a) {
    float d;
    asm("rcp.rn.f32 %0, %1;" : "=f"(d) : "f"(a));
    return d;
}
