// Arithmetic of sampling, with the bits of
// `op/sampling/arithmetic.rs` in qgemm-hal: each f32
// operation rounds once, none is fused.
#pragma once
#include "atoms/numeric.cuh"
#include "atoms/rounded.cuh"

// Order of an excluded token, whose logit is −∞.
constexpr u32 EXCLUDED = 0;
// Order of a logit that is NaN or +∞.
constexpr u32 NON_FINITE = 0xffffffffu;
// Weight of the best token.
constexpr u32 BEST_WEIGHT = 0x80000000u;
constexpr float LEAST_EXPONENT = -23.0f;
constexpr float LARGEST = 3.40282347e+38f;
constexpr float SMALLEST_NORMAL = 1.17549435e-38f;
// ln 2 in two parts.
constexpr float LN_2_HIGH = 0.6933594f, LN_2_LOW = -2.1219444e-4f;

// Order-preserving bits of a logit. Both zeros are equal.
QG_DEVICE u32 order_of(u32 bits) {
    const u32 magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u || bits == 0x7f800000u) return NON_FINITE;
    if (bits == 0xff800000u) return EXCLUDED;
    if (magnitude == 0) return 0x80000000u;
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
QG_DEVICE float logit_of(u32 order) {
    return bits_to_f32(order & 0x80000000u ? order & 0x7fffffffu : ~order);
}

// Order of the logit after the repetition penalty.
QG_DEVICE u32 penalized_order(u32 bits, float penalty) {
    const u32 order = order_of(bits);
    if (order == NON_FINITE) return order;
    const float logit = bits_to_f32(bits);
    const float penalized = logit > 0.0f ? div_rn_f32(logit, penalty) : mul_rn_f32(logit, penalty);
    return order_of(f32_to_bits(penalized > LARGEST ? LARGEST : penalized));
}

// A coefficient more of a polynomial in x.
QG_DEVICE float horner(float sum, float x, float coefficient) {
    return mul_rn_f32(sum, x) + coefficient;
}

// exp(below · inverse_temperature) in units of 2^-31;
// `below` is at most 0.
QG_DEVICE u32 weight_of(float below, float inverse_temperature) {
    const float exponent = mul_rn_f32(below, inverse_temperature);
    if (!(exponent >= LEAST_EXPONENT)) return 0;
    const i32 halvings = (i32)(mul_rn_f32(exponent, 1.44269504f) - 0.5f);
    const float halved = (float)halvings;
    const float rest = exponent - mul_rn_f32(halved, LN_2_HIGH) - mul_rn_f32(halved, LN_2_LOW);
    float power = 1.0f / 5040.0f;
    power = horner(power, rest, 1.0f / 720.0f);
    power = horner(power, rest, 1.0f / 120.0f);
    power = horner(power, rest, 1.0f / 24.0f);
    power = horner(power, rest, 1.0f / 6.0f);
    power = horner(power, rest, 0.5f);
    power = horner(power, rest, 1.0f);
    power = horner(power, rest, 1.0f);
    const float scale = bits_to_f32((u32)(127 + 31 + halvings) << 23);
    return (u32)(mul_rn_f32(power, scale) + 0.5f);
}

// Natural logarithm of a sum of weights in units of
// the best one, which the sum contains.
QG_DEVICE float log_sum(u64 sum) {
    u32 top = 31;
    while (sum >> top > 1) top++;
    const u32 fraction = (u32)(sum << (63 - top) >> 40) & 0x7fffffu;
    float exponent = (float)((i32)top - 31), mantissa = bits_to_f32(0x3f800000u | fraction);
    if (mantissa > 1.41421354f) exponent += 1.0f, mantissa *= 0.5f;
    const float ratio = div_rn_f32(mantissa - 1.0f, mantissa + 1.0f), square = mul_rn_f32(ratio, ratio);
    float series = 1.0f / 9.0f;
    series = horner(series, square, 1.0f / 7.0f);
    series = horner(series, square, 0.2f);
    series = horner(series, square, 1.0f / 3.0f);
    series = horner(series, square, 1.0f);
    const float of_mantissa = mul_rn_f32(2.0f * ratio, series);
    return mul_rn_f32(exponent, LN_2_HIGH) + (mul_rn_f32(exponent, LN_2_LOW) + of_mantissa);
}

// Whole part of total · fraction / 2^32.
QG_DEVICE u64 fraction_of(u64 total, u32 fraction) {
    return (total >> 32) * fraction + ((total & 0xffffffffu) * fraction >> 32);
}

// Weight that top-p keeps at least.
QG_DEVICE u64 kept_weight(float top_p, u64 total) {
    if (top_p >= 1.0f) return total;
    const u64 kept = fraction_of(total, (u32)mul_rn_f32(top_p, 4294967296.0f));
    return kept > 0 ? kept : 1;
}

// Least weight of a token that min-p keeps.
QG_DEVICE u32 least_weight(float min_p) {
    const u32 least = (u32)(mul_rn_f32(min_p, 2147483648.0f) + 0.5f);
    return least > 0 ? least : 1;
}

// The first word of Philox4x32-10.
QG_DEVICE u32 random_word(u32 seed_low, u32 seed_high, u32 position_low, u32 position_high) {
    u32 a = position_low, b = position_high, c = 0, d = 0;
    for (u32 round = 0; round < 10; round++) {
        const u64 first = (u64)a * 0xD2511F53u, second = (u64)c * 0xCD9E8D57u;
        a = (u32)(second >> 32) ^ b ^ seed_low, c = (u32)(first >> 32) ^ d ^ seed_high;
        b = (u32)second, d = (u32)first;
        seed_low += 0x9E3779B9u, seed_high += 0xBB67AE85u;
    }
    return a;
}
