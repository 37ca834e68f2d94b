// Rounding to pairs of 16-bit numbers.
#pragma once
#include "atoms/float.cuh"
#include "atoms/numeric.cuh"

// Pair of f16, or of bf16 for DTYPE_BF16.
// The first number is in the low half.
template <u32 DTYPE>
QG_DEVICE u32 f32_to_halves(float low, float high) {
#if QG_VARIANT >= 80
    return DTYPE == DTYPE_BF16 ? f32_to_bf16x2(low, high) : f32_to_f16x2(low, high);
#else
    return DTYPE == DTYPE_BF16 ? f32_to_bf16(low) | f32_to_bf16(high) << 16 : f32_to_f16(low) | f32_to_f16(high) << 16;
#endif
}
