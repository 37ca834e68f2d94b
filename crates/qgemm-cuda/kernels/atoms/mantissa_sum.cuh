// Integer sums with a mantissa bias.
// An s32 sum starts from the bits of 1.5 · 2²³.
// Read as f32, it is exactly 1.5 · 2²³ + sum, for
// |sum| up to 2²².
// One FFMA then scales the sum and removes the bias.
// I2F (half rate) plus FMUL is slower.
#pragma once
#include "atoms/numeric.cuh"

constexpr u32 MANTISSA_ZERO_BITS = 0x4b400000u;
constexpr float MANTISSA_ZERO = 12582912.0f;

// Scale factor of such sums; below 2^103.
// With at most 22 significant bits the result rounds once,
// because `factor * MANTISSA_ZERO` is then exact.
struct SumFactor {
    float factor, zero;

    QG_DEVICE SumFactor of(float factor) { return {factor, factor * -MANTISSA_ZERO}; }
    QG_DEVICE float times(const SumFactor& f, i32 sum) {
        return fma_f32(bits_to_f32((u32)sum), f.factor, f.zero);
    }
};
