// Exact sums of signed bytes, which become numbers in f32 as they are scaled and added to accumulators.
#pragma once
#include "atoms/mantissa_sum.cuh"
#include "atoms/opaque_register.cuh"
#include "dequant/signed_bytes.cuh"

// Whether sums are scaled by SumFactor, and so begin with MANTISSA_ZERO_BITS: where both W and X have scales. Elsewhere I2F takes no longer,
// and an instruction that begins with zero reads four registers less.
constexpr bool IN_MANTISSA = QG_X_BLOCK_SCALES && SignedBytes::HAS_SCALE && !SignedBytes::HAS_WIDE_SCALES;

// What sums begin with, in a register that all of them share: as a constant it would take a MOV for each.
QG_DEVICE i32 sum_zero() {
    return IN_MANTISSA ? (i32)opaque_register(MANTISSA_ZERO_BITS) : 0;
}

// d + scale · x_scale · sum, without the scales that W or X lacks.
QG_DEVICE float add_sum(float d, const SumFactor& scale, float x_scale, i32 sum) {
    if constexpr (IN_MANTISSA)
        return fma_f32(SumFactor::times(scale, sum), x_scale, d);
    else if constexpr (QG_X_BLOCK_SCALES && SignedBytes::HAS_SCALE)
        return fma_f32(scale.factor * x_scale, (float)sum, d);
    else if constexpr (QG_X_BLOCK_SCALES)
        return fma_f32(x_scale, (float)sum, d);
    else if constexpr (SignedBytes::HAS_SCALE)
        return fma_f32(scale.factor, (float)sum, d);
    else
        return d + (float)sum;
}
