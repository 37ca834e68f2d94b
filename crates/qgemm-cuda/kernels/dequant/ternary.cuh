// TQ2_0, Q2_0: d * (q - 1).
#pragma once
#include "dequant/symmetric.cuh"

using Dequant = Symmetric<1>;
