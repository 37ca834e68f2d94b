// f32 maximum in one instruction.
#pragma once
#include "atoms/types.cuh"

// max.f32: with one NaN operand it returns the other operand.
QG_DEVICE float max_f32(float a, float b) {
    float d;
    asm("max.f32 %0, %1, %2;" : "=f"(d) : "f"(a), "f"(b));
    return d;
}
