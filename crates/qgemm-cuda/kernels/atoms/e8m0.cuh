// E8M0 numbers, powers of two, as f32.
#pragma once
#include "atoms/numeric.cuh"

// 2^(e - 127), exactly; of 255 NaN.
QG_DEVICE float e8m0_to_f32(u32 e) {
    // For e = 0 the number is subnormal in f32.
    const float power = bits_to_f32(e == 0 ? 0x00400000u : e << 23);
    // For e = 255 it is infinite, and infinity times 0 is NaN.
    return fma_f32(power, 0.0f, power);
}
