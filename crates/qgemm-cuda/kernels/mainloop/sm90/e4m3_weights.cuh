// 4-bit weights as E4M3 operands of `wgmma`, decoded from
// packed codes in shared memory.
//
// Integers: bytes 0..16 are E4M3 numbers in units of 2^-9, so
// a byte is its own integer.
// E2M1 with power-of-two scales: E4M3 has more exponent bits.
// Operands absorb scales that are at most 2^11 below the
// row's largest, in units of 2^-6 of the largest.
// Both conversions are exact.
// Accumulators are rescaled at the end.
#pragma once
#include "atoms/byte_difference.cuh"
#include "atoms/float.cuh"
#include "atoms/mma_fp8.cuh"
#include "atoms/wgmma_fp8.cuh"
#include "mainloop/sm90/column_words.cuh"

// Whether operands absorb scales: formats without zero points.
// A macro, because `#if` uses it.
#define QG_TAKES_SCALES (QG_SCALE_PLANES == 1)
// Zero points above 15 are not absorbed whole; no checkpoint
// has them. The warp itself sums X for the rest.
#define QG_SUMS_OF_X 0
static_assert(QG_TAKES_SCALES == (QG_ZERO_POINTS == 0), "zero points are a plane");
// Registers per producer thread.
constexpr u32 PRODUCER_REGISTERS = 24;
// Sum type of an instruction. An accumulator of 1.0 means UNITS.
using Sum = float;
constexpr float UNITS = QG_TAKES_SCALES ? 1.0f : 512.0f;
static_assert(KTile::Codes0::BITS == 4 && QG_CODE_PLANES == 1, "codes are nibbles");
static_assert(!QG_TAKES_SCALES || QG_SUB_BLOCK == 32, "the columns of an instruction share a scale");

// Zero point of a row in each byte, and 128 minus it.
struct ZeroPointBytes {
    u32 zero_point, rest;

    QG_DEVICE ZeroPointBytes of(u32 zero_point) {
        const u32 bytes = (zero_point & 15u) * 0x01010101u;
        return {bytes, 0x80808080u - bytes};
    }
};

// Low nibbles minus the zero point, as sign and magnitude.
QG_DEVICE u32 integers_e4m3(u32 codes, const ZeroPointBytes& offset) {
    const u32 nibbles = codes & 0x0f0f0f0fu;
    // Before `~`, bit 7: the code is not below the zero point.
    return byte_differences(nibbles, offset.zero_point) | (~(nibbles + offset.rest) & 0x80808080u);
}

// E4M3 exponent of 1/2 at a row's largest scale.
// A smaller scale may lag by MOST_LAG powers of two: 1/2 is
// still a normal number.
constexpr u32 HALF_EXPONENT = 12, MOST_LAG = HALF_EXPONENT - 1;

// 2^(exponent - 128), exactly; subnormal below exponent 2.
QG_DEVICE float power_of_two(i32 exponent) {
    if (exponent >= 2) return bits_to_f32((u32)(exponent - 1) << 23);
    return bits_to_f32(exponent >= 0 ? 0x00200000u << exponent : 0x00200000u >> -exponent);
}
// Scale of sums, for codes of scale 2^(e - 127) whose 1/2
// has E4M3 exponent `half`. NaN for e = 255.
QG_DEVICE float scale_of_power(u32 e, u32 half) {
    const float power = power_of_two((i32)e + 7 - (i32)half);
    return e == 255 ? bits_to_f32(0x7fffffffu) : power;
}

// Lookup table of E2M1 magnitudes for `prmt`, a byte each.
// 1/2 has E4M3 exponent `exponent`.
struct Magnitudes {
    u32 low, high;

    QG_DEVICE Magnitudes of(u32 exponent) { return {0x0c080000u + exponent * 0x08080800u, 0x1c181410u + exponent * 0x08080808u}; }
    // Operands of a word of codes: two registers of 16 columns.
    QG_DEVICE void look_up(const Magnitudes& m, u32 word, u32& low, u32& high) {
        const u32 codes = word & 0x77777777u;
        const u32 first = prmt(m.low, m.high, codes & 0xffffu), second = prmt(m.low, m.high, codes >> 16);
        low = prmt(first, second, 0x6420u) | (word << 4 & 0x80808080u);
        high = prmt(first, second, 0x7531u) | (word & 0x80808080u);
    }
};

// Conversion of a row's codes to operands.
#if !QG_TAKES_SCALES
struct RowCodes {
    ZeroPointBytes offset;

    QG_DEVICE RowCodes of(u32 zero_point) { return {ZeroPointBytes::of(zero_point)}; }
    // Whether operands do not absorb all of a zero point.
    QG_DEVICE bool leaves(u32 zero_point) { return zero_point > 15; }
    // The part that operands do not absorb (the upper nibble),
    // negated, as an accumulator value.
    QG_DEVICE Sum rest(u32 zero_point) { return (float)(zero_point & 0xf0u) * (-1.0f / UNITS); }

    QG_DEVICE void decode(const RowCodes& row, u32 word, u32, u32& low, u32& high) {
        low = integers_e4m3(word, row.offset);
        high = integers_e4m3(word >> 4, row.offset);
    }
};
#else
struct RowCodes {
    // Scale exponents of four instructions, a byte each, and
    // the largest.
    u32 exponents, largest;

    // Powers of two from the scale of `step` to the largest.
    QG_DEVICE u32 lag(const RowCodes& row, u32 step) { return row.largest - (row.exponents >> (8 * step) & 0xffu); }
    QG_DEVICE bool is_far(const RowCodes& row, u32 step) { return lag(row, step) > MOST_LAG; }
    QG_DEVICE void decode(const RowCodes& row, u32 word, u32 step, u32& low, u32& high) {
        const u32 own = lag(row, step);
        Magnitudes::look_up(Magnitudes::of(HALF_EXPONENT - (own < MOST_LAG ? own : MOST_LAG)), word, low, high);
    }
};
#endif

// A operand of instruction `step` of a run: the first or
// second 32 columns of the k-block.
// `rows`: the lane's two rows.
QG_DEVICE void decode_step(u32 (&a)[4], const KTile& columns, u32 step, const RowCodes (&rows)[2]) {
    RowCodes::decode(rows[0], columns.codes0.word[step % 2], step, a[0], a[2]);
    RowCodes::decode(rows[1], columns.codes0.word[2 + step % 2], step, a[1], a[3]);
}

template <u32 COLUMNS, u32 ADDS>
QG_DEVICE void multiply_codes(Sum (&sums)[COLUMNS / 2], const u32 (&a)[4], u64 x) {
    wgmma_k32_e4m3_e4m3<COLUMNS, ADDS>(sums, a, x);
}
// Adds four codes of X.
QG_DEVICE Sum add_codes(Sum sum, u32 codes) {
#pragma unroll
    for (u32 i = 0; i < 4; i++) sum += e4m3_to_f32(codes >> (8 * i) & 0xffu);
    return sum;
}
QG_DEVICE Sum add_product(Sum a, Sum b, Sum sum) {
    return fma_f32(a, b, sum);
}
QG_DEVICE float number_of(Sum sum) {
    return sum;
}
