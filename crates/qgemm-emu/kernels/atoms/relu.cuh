// ReLU that propagates NaN.
#pragma once
#include "atoms/types.cuh"

QG_DEVICE float relu(float value) { return value < 0.0f ? 0.0f : value; }
