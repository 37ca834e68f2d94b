// Float conversions that take several instructions.
#pragma once
#include "atoms/numeric.cuh"

QG_DEVICE float bf16_to_f32(u32 bits) {
    return bits_to_f32(bits << 16);
}
// Rounds to nearest even; NaN stays NaN.
// Integer arithmetic, because sm_70 and sm_75
// have no cvt to bf16.
QG_DEVICE u32 f32_to_bf16(float f) {
    const u32 bits = f32_to_bits(f);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (bits >> 16) | 0x40u;
    return (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
}

// Exact E4M3 → f32, through f16, whose exponent
// bias is 8 larger.
QG_DEVICE float e4m3_to_f32(u32 code) {
    return f16_to_f32(((code & 0x80u) << 8) | ((code & 0x7fu) << 7)) * 256.0f;
}
