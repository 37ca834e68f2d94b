// f32 maximum.
#pragma once
#include "atoms/types.cuh"

QG_DEVICE float max_f32(float a, float b) {
    if (a != a) return b;
    return b > a ? b : a;
}
