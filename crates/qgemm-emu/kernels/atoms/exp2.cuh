// Base-2 exponential and logarithm.
// Results are nearest to the exact value.
// A GPU's result is within 2^-22 of it.
#pragma once
#include "atoms/numeric.cuh"

QG_DEVICE float ex2_approx(float x) {
    if (x != x) return bits_to_f32(0x7fffffffu);
    if (x >= 128.0f) return bits_to_f32(0x7f800000u);
    if (x < -126.0f) return 0.0f;
    const i32 whole = (i32)(x < 0.0f ? x - 0.5f : x + 0.5f);
    // Series of e^y, for |y| ≤ ln(2)/2.
    const double y = ((double)x - whole) * 0.6931471805599453;
    double term = 1.0, sum = 1.0;
    for (u32 i = 1; i <= 14; i++) {
        term *= y / i;
        sum += term;
    }
    const u64 bits = (u64)(whole + 1023) << 52;
    double power;
    __builtin_memcpy(&power, &bits, sizeof power);
    return (float)(sum * power);
}
QG_DEVICE float lg2_approx(float x) {
    const u32 bits = f32_to_bits(x);
    if ((bits & 0x7f800000u) == 0) return bits_to_f32(0xff800000u);
    if (x != x || bits >> 31) return bits_to_f32(0x7fffffffu);
    if (bits == 0x7f800000u) return x;
    const i32 exponent = (i32)(bits >> 23) - 127;
    const double m = bits_to_f32((bits & 0x7fffffu) | 0x3f800000u);
    // ln m = 2 artanh((m - 1) / (m + 1)), by series.
    const double z = (m - 1.0) / (m + 1.0);
    double power = z, sum = 0.0;
    for (u32 i = 1; i <= 35; i += 2) {
        sum += power / i;
        power *= z * z;
    }
    return (float)(exponent + 2.0 * sum * 1.4426950408889634);
}
