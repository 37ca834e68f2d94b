// Q8_0: d * q; codes are stored plus 128.
#pragma once
#include "dequant/symmetric.cuh"

using Dequant = Symmetric<128>;
