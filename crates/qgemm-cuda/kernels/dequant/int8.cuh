// Grouped 8-bit integers with a zero point: d * (q - z).
#pragma once
#include "dequant/zero_point.cuh"

using Dequant = ZeroPoint;
