// Grouped integers around 8 (torchao int4):
// d * (q - 8) + m, both f16.
#pragma once
#include "dequant/affine.cuh"

using Dequant = CenteredAffine<8>;
