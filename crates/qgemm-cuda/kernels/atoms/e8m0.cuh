// E8M0 (power-of-two scales) to f32.
#pragma once
#include "atoms/numeric.cuh"

// 2^(e - 127), exactly; NaN for e = 255.
QG_DEVICE float e8m0_to_f32(u32 e) {
    // e = 0 is subnormal in f32.
    const float power = bits_to_f32(e == 0 ? 0x00400000u : e << 23);
    // e = 255 is infinity here; infinity · 0 is NaN.
    return fma_f32(power, 0.0f, power);
}
