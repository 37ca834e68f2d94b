// Exact E4M3 conversions to f16 and f32.
// Codes 0x7f and 0xff become NaN.
#pragma once
#include "atoms/float.cuh"
#include "atoms/fp8.cuh"
#include "atoms/fp8_upper.cuh"
#include "atoms/numeric.cuh"

#if QG_VARIANT < 89
// f16 pair of two codes in the upper bytes of 16-bit halves.
QG_DEVICE u32 e4m3_upper_bytes_f16(u32 upper) {
    // Exponent biases are 7 and 15: shifted code bits are
    // an f16 of value · 2^-8.
    const u32 parts = and_or(upper, 0x80008000u, (upper >> 1) & 0x3f803f80u);
    // NaN has the bits of 480, and 480 · 144 overflows f16.
    // The largest number, 448, does not.
    // Infinity · 0 is NaN.
    return fma_f16x2(mul_f16x2(parts, 0x78807880u), 0u, mul_f16x2(parts, 0x5c005c00u));
}
#endif

// f16 pair of bytes FIRST and SECOND of a word.
template <u32 FIRST, u32 SECOND>
QG_DEVICE u32 e4m3_pair_f16(u32 codes) {
#if QG_VARIANT >= 89
    if constexpr (FIRST == 0 && SECOND == 1) return cvt_f16x2_e4m3x2(codes & 0xffffu);
    if constexpr (FIRST == 2 && SECOND == 3) return cvt_f16x2_e4m3x2_upper(codes);
    return cvt_f16x2_e4m3x2(prmt(codes, 0, 0x4400u | SECOND << 4 | FIRST));
#else
    if constexpr (FIRST == 0 && SECOND == 2) return e4m3_upper_bytes_f16(codes << 8);
    if constexpr (FIRST == 1 && SECOND == 3) return e4m3_upper_bytes_f16(codes);
    return e4m3_upper_bytes_f16(prmt(codes, 0, 0x0404u | FIRST << 4 | SECOND << 12));
#endif
}

// f32 of one code.
QG_DEVICE float e4m3_to_f32_or_nan(u32 code) {
    return (code & 0x7fu) == 0x7fu ? bits_to_f32(0x7fffffffu) : e4m3_to_f32(code);
}
