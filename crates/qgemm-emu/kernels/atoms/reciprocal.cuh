// Reciprocal, rounded to nearest.
#pragma once
#include "atoms/types.cuh"

QG_DEVICE float rcp_approx(float x) {
    const float d = 1.0f / x;
    const float magnitude = d < 0.0f ? -d : d;
    return magnitude < 1.17549435e-38f ? 0.0f * d : d;
}
