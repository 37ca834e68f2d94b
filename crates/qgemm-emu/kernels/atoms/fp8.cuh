// FP8 pair conversions.
#pragma once
#include "atoms/numeric.cuh"

#if QG_VARIANT >= 89
// E4M3 has no infinity, and one NaN per sign.
// Shifted code bits are an f16 of value / 256.
QG_DEVICE u32 emu_e4m3_to_f16(u32 code) {
    if ((code & 0x7fu) == 0x7fu) return 0x7fffu;
    return f32_to_f16(f16_to_f32((code & 0x80u) << 8 | (code & 0x7fu) << 7) * 256.0f);
}
QG_DEVICE u32 cvt_f16x2_e4m3x2(u32 pair) {
    return emu_e4m3_to_f16(pair & 0xffu) | emu_e4m3_to_f16(pair >> 8 & 0xffu) << 16;
}

// E5M2 is the upper byte of an f16.
QG_DEVICE u32 emu_e5m2_to_f16(u32 code) {
    return (code & 0x7fu) > 0x7cu ? 0x7fffu : code << 8;
}
QG_DEVICE u32 cvt_f16x2_e5m2x2(u32 pair) {
    return emu_e5m2_to_f16(pair & 0xffu) | emu_e5m2_to_f16(pair >> 8 & 0xffu) << 16;
}

// .satfinite: numbers beyond the largest finite one, and
// infinities, become that number. NaN stays NaN.
template <u32 FRACTION, i32 LEAST, u32 LARGEST>
QG_DEVICE u32 emu_f32_to_fp8(float f) {
    if (f != f) return 0x7fu;
    const u32 sign = __builtin_signbit(f) ? 0x80u : 0;
    const float magnitude = sign ? -f : f;
    // 2^16 exceeds both formats. Infinities must not reach
    // `emu_round`: they have no usable exponent.
    const u32 code = magnitude >= 65536.0f ? LARGEST : emu_round<FRACTION, LEAST>(magnitude);
    return sign | (code < LARGEST ? code : LARGEST);
}
QG_DEVICE u32 cvt_e4m3x2_f32(float high, float low) {
    return emu_f32_to_fp8<3, -6, 0x7e>(high) << 8 | emu_f32_to_fp8<3, -6, 0x7e>(low);
}
QG_DEVICE u32 cvt_e5m2x2_f32(float high, float low) {
    return emu_f32_to_fp8<2, -14, 0x7b>(high) << 8 | emu_f32_to_fp8<2, -14, 0x7b>(low);
}
#endif
