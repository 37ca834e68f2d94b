// 8-bit grouped integers with zero points.
// Weight: d * (q - z).
#pragma once
#include "dequant/zero_point.cuh"

using Dequant = ZeroPoint;
