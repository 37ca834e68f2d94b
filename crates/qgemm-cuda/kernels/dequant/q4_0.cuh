// Q4_0: d * (q - 8).
#pragma once
#include "dequant/symmetric.cuh"

using Dequant = Symmetric<8>;
