// bf16x2 arithmetic.
#pragma once
#include "atoms/numeric.cuh"

#if QG_VARIANT >= 90
// Rounds twice if the f32 difference is inexact.
// Kernels subtract small integers only.
QG_DEVICE u32 sub_bf16x2(u32 a, u32 b) {
    const float low = bits_to_f32(a << 16) - bits_to_f32(b << 16), high = bits_to_f32(a & 0xffff0000u) - bits_to_f32(b & 0xffff0000u);
    return f32_to_bf16x2(low, high);
}
#endif
