// Q4_1: d * q + m.
#pragma once
#include "dequant/affine.cuh"

using Dequant = Affine;
