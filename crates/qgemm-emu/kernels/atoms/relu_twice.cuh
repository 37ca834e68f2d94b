// Twice the ReLU; propagates NaN.
#pragma once
#include "atoms/types.cuh"

QG_DEVICE float relu_twice(float value) { return value < 0.0f ? 0.0f : value + value; }
