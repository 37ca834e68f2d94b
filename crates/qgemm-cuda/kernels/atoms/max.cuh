// The larger of two numbers in one instruction.
#pragma once
#include "atoms/types.cuh"

// max.f32: of a number and a NaN, the number.
QG_DEVICE float max_f32(float a, float b) {
    float d;
    asm("max.f32 %0, %1, %2;" : "=f"(d) : "f"(a), "f"(b));
    return d;
}
