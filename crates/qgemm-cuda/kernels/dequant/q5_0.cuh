// Q5_0: d * (q - 16).
#pragma once
#include "dequant/symmetric.cuh"

using Dequant = Symmetric<16>;
