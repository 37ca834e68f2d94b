// Arithmetic with pairs of bf16.
#pragma once
#include "atoms/numeric.cuh"

#if QG_VARIANT >= 90
// A difference of f32 rounds twice where it is not exact in f32; kernels subtract small integers.
QG_DEVICE u32 sub_bf16x2(u32 a, u32 b) {
    const float low = bits_to_f32(a << 16) - bits_to_f32(b << 16), high = bits_to_f32(a & 0xffff0000u) - bits_to_f32(b & 0xffff0000u);
    return f32_to_bf16x2(low, high);
}
#endif
