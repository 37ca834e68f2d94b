// Q5_K: d * scale * q - dmin * min.
// Sub-blocks of 32.
#pragma once
#include "dequant/affine_k.cuh"

using Dequant = AffineK;
