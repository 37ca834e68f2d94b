// Raw operands: integer codes from which nothing is taken off, each for the price of a mask. What that leaves out is made up
// for on the sums: weight = scale * (code - offset) + min. Kernels whose scales act on sums take them (`QG_RAW_CODES`).
//
// In f16 codes stay where they lie, in the mantissa of a subnormal: 2^lift * code in units of 2^-24. Matrix instructions
// take subnormals exactly (Fasi, Higham, Mikaitis, Pranesh, "Numerical behavior of NVIDIA tensor cores", 2021). bf16
// subnormals are too small for sums in f32; codes become the low bits of 128 + code.
#pragma once
#include "dequant/integer.cuh"

#if QG_X_DTYPE == 1
// Both codes of a pair, if they were 1 and -offset.
constexpr u32 RAW_ONE = 0x00010001u;
QG_DEVICE constexpr u32 raw_minus(u32 offset) { return 0x80008000u | offset * 0x00010001u; }
// What is or'ed to a pair, and what that adds to its codes.
constexpr u32 RAW_EXPONENT = 0, RAW_BIAS = 0;
// Units of an operand that make 1.
constexpr float RAW_UNITS = 16777216.0f;
constexpr u32 MANTISSA_BITS = 10;
#else
constexpr u32 RAW_ONE = 0x3f803f80u;
QG_DEVICE constexpr u32 raw_minus(u32 offset) { return 0xc300c300u | offset * 0x00010001u; }
constexpr u32 RAW_EXPONENT = 0x43004300u, RAW_BIAS = 128;
constexpr float RAW_UNITS = 1.0f;
constexpr u32 MANTISSA_BITS = 7;
#endif

// Bits that codes of step `step` of a chunk lie above their place: 0 or LIFT. Sums of either kind are kept apart, which does
// not pay where both are in a sum of two steps.
constexpr u32 LIFT = 4;
constexpr float LIFTED = 1.0f / (1 << LIFT);
constexpr bool LIFTS = RAW_BIAS == 0 && code_bits<Slab>() + LIFT <= MANTISSA_BITS && QG_SUB_BLOCK / STEP_K != 2;
QG_DEVICE constexpr u32 raw_lift(u32 step) {
    return LIFTS ? Slab::Codes0::shift(step, 0) / LIFT * LIFT : 0;
}

template <class S>
QG_DEVICE u32 raw_pair(const S& s, u32 quad, u32 pair) {
    using Low = typename S::Codes0;
    const u32 word = Low::word_of(s.codes0, quad), lift = raw_lift(quad % STEPS);
    // Bytes 0 and 2 of a word, or 1 and 3.
    if constexpr (Low::BITS == 8) return prmt(word, 0, pair == 0 ? 0x4240u : 0x4341u);
    const u32 codes = and_or(word >> (Low::shift(quad, pair) - lift), Low::MASK << lift, RAW_EXPONENT);
    if constexpr (QG_CODE_PLANES > 1) return or_upper_bits(codes, s, quad, pair, lift);
    return codes;
}

// Format D, of which codes are taken raw: offsets that rows have of their own are part of the minimum. One that all codes
// share is what sums begin with, as -offset * Σx is the same for all rows.
template <class D>
struct Raw : D {
    static constexpr bool HAS_MIN = D::HAS_MIN || QG_ZERO_POINTS;

    QG_DEVICE float min(const Slab& s, u32 row, u32 sub) {
        float min = 0.0f;
        if constexpr (D::HAS_MIN) min = D::min(s, row, sub);
        if constexpr (QG_ZERO_POINTS)
            min -= (float)(RAW_BIAS + D::zero_point(s, row, sub)) * D::scale(s, row, sub);
        else if constexpr (RAW_BIAS != 0)
            min -= RAW_BIAS * D::scale(s, row, sub);
        return min;
    }

    // Operands whose product with X is that beginning, for sums whose codes are lifted by `lift`; or, where there is a
    // minimum, Σx.
    QG_DEVICE constexpr u32 constant_pair(u32 lift) {
        if constexpr (HAS_MIN) return RAW_ONE;
        else return raw_minus(D::OFFSET << lift);
    }
};
