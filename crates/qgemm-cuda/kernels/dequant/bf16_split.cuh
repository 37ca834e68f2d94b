// f32 as a sum of two bf16 numbers (bf16x3):
// x = hi + lo, each rounded to nearest.
#pragma once
#include "atoms/numeric.cuh"

#if QG_VARIANT >= 80
// Whether |x| exceeds bf16's largest number, or is infinite.
// Then hi is ±1 and lo is x: an infinite hi would give NaN in
// products with the other operand's lo.
QG_DEVICE bool is_beyond_bf16(float x) {
    return bits_to_f32(f32_to_bits(x) & 0x7fffffffu) > bits_to_f32(0x7f7f0000u);
}
QG_DEVICE float high_part(float x) {
    return is_beyond_bf16(x) ? bits_to_f32((f32_to_bits(x) & 0x80000000u) | 0x3f800000u) : x;
}
// The rest after rounding to hi.
// The largest numbers become bf16's largest.
QG_DEVICE float low_part(float x, u32 hi_bits) {
    return is_beyond_bf16(x) ? bits_to_f32(f32_to_bits(x) & 0xffff0000u) : x - bits_to_f32(hi_bits);
}

// Splits two values into bf16 pairs.
QG_DEVICE void split_bf16x2(u32& hi, u32& lo, u32 first, u32 second) {
    const float x = bits_to_f32(first), y = bits_to_f32(second);
    hi = f32_to_bf16x2(high_part(x), high_part(y));
    lo = f32_to_bf16x2(low_part(x, hi << 16), low_part(y, hi & 0xffff0000u));
}

// The same for numbers whose hi is finite: of others lo is NaN,
// and so are products with it.
QG_DEVICE void split_finite_bf16x2(u32& hi, u32& lo, float first, float second) {
    hi = f32_to_bf16x2(first, second);
    lo = f32_to_bf16x2(first - bits_to_f32(hi << 16), second - bits_to_f32(hi & 0xffff0000u));
}
#endif
