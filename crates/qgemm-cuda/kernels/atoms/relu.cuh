// ReLU that propagates NaN.
#pragma once
#include "atoms/types.cuh"

QG_DEVICE float relu(float value) {
#if QG_VARIANT >= 80
    float d;
    asm("max.NaN.f32 %0, %1, 0f00000000;" : "=f"(d) : "f"(value));
    return d;
#else
    return value < 0.0f ? 0.0f : value;
#endif
}
