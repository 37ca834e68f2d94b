// Integer operands: codes without their offset,
// extracted by one mask.
// The offset acts on the accumulators:
// weight = scale * (code - offset) + min.
// Kernels with scales on accumulators use them
// (`QG_INTEGER_OPERANDS`).
//
// f16: a code stays in place, in the mantissa of a subnormal.
// Its value is 2^lift * code in units of 2^-24.
// Tensor cores handle subnormals exactly (Fasi, Higham,
// Mikaitis, Pranesh, "Numerical behavior of NVIDIA
// tensor cores", 2021).
// bf16: subnormals are too small for f32 accumulators, so
// codes become the low bits of 128 + code.
#pragma once
#include "dequant/integer.cuh"

#if QG_X_DTYPE == 1
// Pairs of code 1, and of code -offset.
constexpr u32 INTEGER_ONE = 0x00010001u;
QG_DEVICE constexpr u32 integer_minus(u32 offset) { return 0x80008000u | offset * 0x00010001u; }
// Bits ORed into a pair, and the bias that they add to codes.
constexpr u32 INTEGER_EXPONENT = 0, INTEGER_BIAS = 0;
// Operand units per 1.0.
constexpr float INTEGER_UNITS = 16777216.0f;
constexpr u32 MANTISSA_BITS = 10;
#else
constexpr u32 INTEGER_ONE = 0x3f803f80u;
QG_DEVICE constexpr u32 integer_minus(u32 offset) { return 0xc300c300u | offset * 0x00010001u; }
constexpr u32 INTEGER_EXPONENT = 0x43004300u, INTEGER_BIAS = 128;
constexpr float INTEGER_UNITS = 1.0f;
constexpr u32 MANTISSA_BITS = 7;
#endif

// Lift of MMA k-step `k_step`: codes lie 0 or LIFT bits high.
// Each lift needs separate accumulators.
// That does not pay if a partial of two k-steps has both lifts.
constexpr u32 LIFT = 4;
constexpr float LIFT_FACTOR = 1.0f / (1 << LIFT);
// Both pairs of a quad are assembled at once, one code a byte.
// The saved shifts of the second plane outweigh the
// byte extraction.
constexpr bool ASSEMBLES_BYTES = QG_CODE_PLANES > 1 && KTile::Codes0::BITS == 4;
constexpr bool USES_LIFT =
    INTEGER_BIAS == 0 && !ASSEMBLES_BYTES && code_bits<KTile>() + LIFT <= MANTISSA_BITS && QG_SUB_BLOCK / K_STEP != 2;
QG_DEVICE constexpr u32 integer_lift(u32 k_step) {
    return USES_LIFT ? KTile::Codes0::shift(k_step, 0) / LIFT * LIFT : 0;
}

template <class S>
QG_DEVICE u32 integer_operand_pair(const S& kt, u32 quad, u32 pair) {
    using Low = typename S::Codes0;
    u32 word = Low::word_of(kt.codes0, quad);
    if constexpr (!ASSEMBLES_BYTES && Low::BITS < 8) {
        const u32 lift = integer_lift(quad % K_STEPS);
        const u32 codes = and_or(word >> (Low::shift(quad, pair) - lift), Low::MASK << lift, INTEGER_EXPONENT);
        if constexpr (QG_CODE_PLANES > 1) return or_upper_bits(codes, kt, quad, pair, lift);
        return codes;
    }
    if constexpr (ASSEMBLES_BYTES) {
        using High = typename S::Codes1;
        constexpr u32 BYTES = 0x01010101u, LOW = ((1u << Low::BITS) - 1) * BYTES;
        constexpr u32 HIGH = ((1u << High::BITS) - 1 << Low::BITS) * BYTES;
        const u32 high = High::word_of(kt.codes1, quad), from = High::shift(quad, 0), to = Low::BITS;
        word = and_or(from >= to ? high >> (from - to) : high << (to - from), HIGH, word >> Low::shift(quad, 0) & LOW);
    }
    // Bytes 0 and 2 of a word, or bytes 1 and 3.
    return prmt(word, INTEGER_EXPONENT, pair == 0 ? 0x5250u : 0x5351u);
}

template <class D>
QG_DEVICE constexpr auto has_super_block_mins(int) -> decltype(&D::unit, true) { return D::HAS_MIN; }
template <class D>
QG_DEVICE constexpr bool has_super_block_mins(long) { return false; }

// Format D with integer operands.
// Per-row offsets are part of the minimum.
// A constant offset is the initial accumulator, -offset * Σx,
// equal for all rows.
template <class D>
struct IntegerOperands : D {
    // Super-block minimums, with their constant offsets, act on
    // the X block sums of a whole k-tile.
    // See `mainloop/super_block_minimums.cuh`.
    static constexpr bool SUPER_BLOCK_MINIMUMS = has_super_block_mins<D>(0);
    static constexpr bool HAS_MIN = D::HAS_MIN && !SUPER_BLOCK_MINIMUMS || QG_ZERO_POINTS;

    QG_DEVICE float min(const KTile& kt, u32 row, u32 sub) {
        float min = 0.0f;
        if constexpr (D::HAS_MIN && !SUPER_BLOCK_MINIMUMS) min = D::min(kt, row, sub);
        if constexpr (QG_ZERO_POINTS)
            min -= (float)(INTEGER_BIAS + D::zero_point(kt, row, sub)) * D::scale(kt, row, sub);
        else if constexpr (INTEGER_BIAS != 0)
            min -= INTEGER_BIAS * D::scale(kt, row, sub);
        return min;
    }

    // Operand pair whose product with X is the initial
    // accumulator, for codes of lift `lift`. With a minimum
    // the product is Σx.
    QG_DEVICE constexpr u32 constant_pair(u32 lift) {
        if constexpr (HAS_MIN || SUPER_BLOCK_MINIMUMS) return INTEGER_ONE;
        else return integer_minus(D::OFFSET << lift);
    }
};
