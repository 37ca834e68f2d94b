// Grouped integers with an f16 scale and minimum (MLX):
// d * q + m.
#pragma once
#include "dequant/affine.cuh"

using Dequant = Affine;
