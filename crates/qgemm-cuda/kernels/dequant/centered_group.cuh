// Grouped integers around 8 with an f16 scale and
// addend (torchao int4): d * (q - 8) + m.
#pragma once
#include "dequant/affine.cuh"

using Dequant = CenteredAffine<8>;
