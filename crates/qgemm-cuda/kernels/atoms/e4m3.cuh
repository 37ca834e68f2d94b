// E4M3 numbers as wider ones, exactly. The codes of NaN, 0x7f and 0xff, become NaN.
#pragma once
#include "atoms/float.cuh"
#include "atoms/fp8.cuh"
#include "atoms/fp8_upper.cuh"
#include "atoms/numeric.cuh"

#if QG_VARIANT < 89
// Two codes, each the upper byte of a half, as a pair of f16.
QG_DEVICE u32 e4m3_upper_bytes_f16(u32 upper) {
    // The biases are 7 and 15, so that a code's bits are those of an f16 that is 2^-8 of its number.
    const u32 parts = and_or(upper, 0x80008000u, (upper >> 1) & 0x3f803f80u);
    // The code of NaN has the bits of 480: times 144 that is infinite in f16, and 448 is not. Infinity times 0 is NaN.
    return fma_f16x2(mul_f16x2(parts, 0x78807880u), 0u, mul_f16x2(parts, 0x5c005c00u));
}
#endif

// Bytes FIRST and SECOND of a word as a pair of f16.
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

// One number.
QG_DEVICE float e4m3_to_f32_or_nan(u32 code) {
    return (code & 0x7fu) == 0x7fu ? bits_to_f32(0x7fffffffu) : e4m3_to_f32(code);
}
