// Reciprocal square root, rounded twice.
#pragma once
#include "atoms/types.cuh"

QG_DEVICE float rsqrt_approx(float x) {
    const float magnitude = x < 0.0f ? -x : x;
    return 1.0f / __builtin_sqrtf(magnitude < 1.17549435e-38f ? 0.0f * x : x);
}
