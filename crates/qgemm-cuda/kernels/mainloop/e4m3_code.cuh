// f32 to E4M3, with or without the instruction.
#pragma once
#include "atoms/float.cuh"
#include "atoms/fp8.cuh"

// Rounds to nearest even and saturates.
QG_DEVICE u32 f32_to_e4m3(float value) {
#if QG_VARIANT >= 89
    return cvt_e4m3x2_f32(0.0f, value) & 0xffu;
#else
    const u32 bits = f32_to_bits(value), magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return 0x7fu;
    const u32 normal = (magnitude - (120u << 23) + 0x7ffffu + (magnitude >> 20 & 1u)) >> 20;
    // Subnormals are multiples of 2^-9.
    // That is the ulp of f32 at 2^14.
    const u32 subnormal = f32_to_bits(bits_to_f32(magnitude) + 16384.0f) - 0x46800000u;
    const u32 code = magnitude < 0x3c800000u ? subnormal : normal;
    return (bits >> 24 & 0x80u) | (code < 0x7eu ? code : 0x7eu);
#endif
}

// E4M3 pair, `low` in the low byte.
QG_DEVICE u32 f32_to_e4m3x2(float low, float high) {
#if QG_VARIANT >= 89
    return cvt_e4m3x2_f32(high, low);
#else
    return f32_to_e4m3(low) | f32_to_e4m3(high) << 8;
#endif
}
