// Exact s8 sums, converted to f32 as they are scaled.
#pragma once
#include "atoms/mantissa_sum.cuh"
#include "atoms/opaque_register.cuh"
#include "dequant/signed_bytes.cuh"

// Whether sums use SumFactor and start from MANTISSA_ZERO_BITS.
// It pays if both W and X have scales.
// Otherwise I2F is as fast, and an MMA that starts from zero
// reads four registers less.
constexpr bool IN_MANTISSA = QG_X_BLOCK_SCALES && SignedBytes::HAS_SCALE && !SignedBytes::HAS_WIDE_SCALES;

// Initial value of sums, in one shared register; as a constant
// it would take a MOV per sum.
QG_DEVICE i32 sum_zero() {
    return IN_MANTISSA ? (i32)opaque_register(MANTISSA_ZERO_BITS) : 0;
}

// Adds a sum times its scales; a missing scale is 1.
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
