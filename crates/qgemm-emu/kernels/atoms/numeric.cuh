// Bit permutation, f16x2 and conversions, bit-exact.
// A NaN result is canonical, as on a GPU:
// all bits of the magnitude are set.
#pragma once
#include "atoms/types.cuh"

QG_DEVICE float bits_to_f32(u32 bits) {
    float f;
    __builtin_memcpy(&f, &bits, sizeof f);
    return f;
}
QG_DEVICE u32 f32_to_bits(float f) {
    u32 bits;
    __builtin_memcpy(&bits, &f, sizeof bits);
    return bits;
}

// Rounds a finite magnitude to nearest even.
// The format has FRACTION significand bits and the least
// normal exponent LEAST.
// Past the format's range, codes continue as if it
// had more exponents.
template <u32 FRACTION, i32 LEAST>
QG_DEVICE u32 emu_round(double value) {
    u64 bits;
    __builtin_memcpy(&bits, &value, sizeof bits);
    const i32 exponent = (i32)((bits >> 52) & 0x7ffu) - 1023;
    // At most half of the least subnormal; ties go to zero.
    if (exponent < LEAST - (i32)FRACTION - 1) return 0;
    const bool normal = exponent >= LEAST;
    const u64 significand = (bits & ((1ull << 52) - 1)) | (1ull << 52);
    const u32 dropped = 52 - FRACTION + (normal ? 0 : (u32)(LEAST - exponent));
    const u64 rest = significand & ((1ull << dropped) - 1), half = 1ull << (dropped - 1);
    u64 kept = significand >> dropped;
    if (rest > half || (rest == half && (kept & 1))) kept++;
    // A carry out of the significand increments the exponent.
    return (u32)kept + (normal ? (u32)(exponent - LEAST) << FRACTION : 0);
}

QG_DEVICE u32 emu_f64_to_f16(double value) {
    if (value != value) return 0x7fffu;
    const u32 sign = __builtin_signbit(value) ? 0x8000u : 0;
    const double magnitude = sign ? -value : value;
    if (magnitude >= 65536.0) return sign | 0x7c00u;
    return sign | emu_round<10, -14>(magnitude);
}

// prmt.b32: byte i is byte `selector nibble i` of {a, b}.
// If the nibble's top bit is set, the byte's sign fills
// all bits instead.
QG_DEVICE u32 prmt(u32 a, u32 b, u32 selector) {
    const u64 bytes = (u64)b << 32 | a;
    u32 d = 0;
    for (u32 i = 0; i < 4; i++) {
        const u32 nibble = selector >> (4 * i) & 0xfu;
        u32 byte = (u32)(bytes >> (8 * (nibble & 7u))) & 0xffu;
        if (nibble & 8u) byte = byte & 0x80u ? 0xffu : 0;
        d |= byte << (8 * i);
    }
    return d;
}

QG_DEVICE float fma_f32(float a, float b, float c) {
    const float d = __builtin_fmaf(a, b, c);
    return d == d ? d : bits_to_f32(0x7fffffffu);
}

QG_DEVICE float sqrt_f32(float a) {
    const float d = __builtin_sqrtf(a);
    return d == d ? d : bits_to_f32(0x7fffffffu);
}

QG_DEVICE u32 and_or(u32 a, u32 mask, u32 bits) {
    return (a & mask) | bits;
}

// dp4a.s32.s32: c + the dot product of four s8 pairs, wrapping.
QG_DEVICE i32 dp4a(i32 a, i32 b, i32 c) {
    u32 sum = (u32)c;
    for (u32 i = 0; i < 4; i++) sum += (u32)((i32)(i8)((u32)a >> (8 * i)) * (i32)(i8)((u32)b >> (8 * i)));
    return (i32)sum;
}

QG_DEVICE float f16_to_f32(u32 bits) {
    const u32 sign = (bits & 0x8000u) << 16, magnitude = bits & 0x7fffu;
    if (magnitude > 0x7c00u) return bits_to_f32(0x7fffffffu);
    if (magnitude == 0x7c00u) return bits_to_f32(sign | 0x7f800000u);
    // 2^-24 is the least subnormal.
    if (magnitude < 0x400u) return bits_to_f32(sign | f32_to_bits((float)magnitude * 0x1p-24f));
    return bits_to_f32(sign | ((magnitude << 13) + (112u << 23)));
}
QG_DEVICE u32 f32_to_f16(float f) {
    return emu_f64_to_f16(f);
}

// Sums, differences and products of two f16 are exact in double.
QG_DEVICE u32 sub_f16x2(u32 a, u32 b) {
    const u32 low = emu_f64_to_f16((double)f16_to_f32(a) - f16_to_f32(b));
    return low | emu_f64_to_f16((double)f16_to_f32(a >> 16) - f16_to_f32(b >> 16)) << 16;
}
QG_DEVICE u32 mul_f16x2(u32 a, u32 b) {
    const u32 low = emu_f64_to_f16((double)f16_to_f32(a) * f16_to_f32(b));
    return low | emu_f64_to_f16((double)f16_to_f32(a >> 16) * f16_to_f32(b >> 16)) << 16;
}

// The product has 22 bits and is exact.
// If the sum needs more than 53 bits, the product is
// below 2^-30 of c.
// The result is then c in f16, so double rounding does no harm.
QG_DEVICE u32 emu_fma_f16(u32 a, u32 b, u32 c) {
    return emu_f64_to_f16((double)f16_to_f32(a) * f16_to_f32(b) + f16_to_f32(c));
}
QG_DEVICE u32 fma_f16x2(u32 a, u32 b, u32 c) {
    return emu_fma_f16(a, b, c) | emu_fma_f16(a >> 16, b >> 16, c >> 16) << 16;
}

#if QG_VARIANT >= 80
QG_DEVICE u32 emu_f32_to_bf16(float f) {
    const u32 bits = f32_to_bits(f);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return 0x7fffu;
    return (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
}
QG_DEVICE u32 f32_to_f16x2(float low, float high) {
    return f32_to_f16(low) | f32_to_f16(high) << 16;
}
QG_DEVICE u32 f32_to_bf16x2(float low, float high) {
    return emu_f32_to_bf16(low) | emu_f32_to_bf16(high) << 16;
}
QG_DEVICE u32 f32_to_tf32(float f) {
    const u32 bits = f32_to_bits(f), magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return 0x7fffffffu;
    return magnitude == 0x7f800000u ? bits : (bits + 0x1000u) & ~0x1fffu;
}
#endif
