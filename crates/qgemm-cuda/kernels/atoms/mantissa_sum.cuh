// Sums of integers in s32 that begin with the bits of 1.5 · 2²³, and so are 1.5 · 2²³ + sum as numbers of f32, exactly, up to 2²² either way.
// One FFMA scales such a sum and takes the beginning away; I2F, at half of its rate, and FMUL would be two instructions.
#pragma once
#include "atoms/numeric.cuh"

constexpr u32 MANTISSA_ZERO_BITS = 0x4b400000u;
constexpr float MANTISSA_ZERO = 12582912.0f;

// A factor of sums, below 2^103. It rounds once where it has at most 22 bits, for then that of MANTISSA_ZERO is exact.
struct SumFactor {
    float factor, zero;

    QG_DEVICE SumFactor of(float factor) { return {factor, factor * -MANTISSA_ZERO}; }
    QG_DEVICE float times(const SumFactor& f, i32 sum) {
        return fma_f32(bits_to_f32((u32)sum), f.factor, f.zero);
    }
};
