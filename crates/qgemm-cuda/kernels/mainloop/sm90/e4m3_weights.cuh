// Weights of four bits as E4M3 operands of `wgmma`, from packed codes in shared memory.
//
// Integers: E4M3 numbers below 2^-4 are integers times 2^-9, bytes up to 16 are worth as many units. E2M1 codes with powers of two: E4M3 has
// three bits more of exponent, so that codes whose scales are within 2^11 of one another become operands with their scales, times 2^6, of the
// largest. Either is exact, and accumulators are brought back to numbers at the end.
#pragma once
#include "atoms/byte_difference.cuh"
#include "atoms/float.cuh"
#include "atoms/mma_fp8.cuh"
#include "atoms/wgmma_fp8.cuh"
#include "mainloop/sm90/column_words.cuh"

// Whether operands take scales in: those of formats without zero points. Conditions of the preprocessor need it.
#define QG_TAKES_SCALES (QG_SCALE_PLANES == 1)
// What operands leave of zero points, which no checkpoint has, is multiplied with sums of X that the warp makes.
#define QG_SUMS_OF_X 0
static_assert(QG_TAKES_SCALES == (QG_ZERO_POINTS == 0), "zero points are a plane");
// Registers of a producer.
constexpr u32 PRODUCER_REGISTERS = 24;
// Sums of an instruction, and 1 in units of an accumulator.
using Sum = float;
constexpr float UNITS = QG_TAKES_SCALES ? 1.0f : 512.0f;
static_assert(KTile::Codes0::BITS == 4 && QG_CODE_PLANES == 1, "codes are nibbles");
static_assert(!QG_TAKES_SCALES || QG_SUB_BLOCK == 32, "the columns of an instruction share a scale");

// The zero point of a row, as bytes, and 128 less it.
struct ZeroPointBytes {
    u32 zero_point, rest;

    QG_DEVICE ZeroPointBytes of(u32 zero_point) {
        const u32 bytes = (zero_point & 15u) * 0x01010101u;
        return {bytes, 0x80808080u - bytes};
    }
};

// Integers of the low nibbles of `codes`, less their zero point, as sign and magnitude.
QG_DEVICE u32 integers_e4m3(u32 codes, const ZeroPointBytes& offset) {
    const u32 nibbles = codes & 0x0f0f0f0fu;
    // Bit 7 of a byte says that the code is not below the zero point.
    return byte_differences(nibbles, offset.zero_point) | (~(nibbles + offset.rest) & 0x80808080u);
}

// The E4M3 exponent of 1/2 with the largest scale of a row, and powers of two by which another may be less: 1/2 is no subnormal number then.
constexpr u32 HALF_EXPONENT = 12, MOST_LAG = HALF_EXPONENT - 1;

// 2^(exponent - 128), exactly: for exponents below 2 it is subnormal in f32.
QG_DEVICE float power_of_two(i32 exponent) {
    if (exponent >= 2) return bits_to_f32((u32)(exponent - 1) << 23);
    return bits_to_f32(exponent >= 0 ? 0x00200000u << exponent : 0x00200000u >> -exponent);
}
// What sums are multiplied by whose operands are codes with scale 2^(e - 127), where 1/2 has E4M3 exponent `half`; of e = 255 NaN.
QG_DEVICE float scale_of_power(u32 e, u32 half) {
    const float power = power_of_two((i32)e + 7 - (i32)half);
    return e == 255 ? bits_to_f32(0x7fffffffu) : power;
}

// Magnitudes of E2M1 codes, times powers of two that make the exponent of 1/2 `exponent`: a byte each, for `prmt` to look up.
struct Magnitudes {
    u32 low, high;

    QG_DEVICE Magnitudes of(u32 exponent) { return {0x0c080000u + exponent * 0x08080800u, 0x1c181410u + exponent * 0x08080808u}; }
    // The operands of a word of codes, two registers of 16 columns each.
    QG_DEVICE void look_up(const Magnitudes& m, u32 word, u32& low, u32& high) {
        const u32 codes = word & 0x77777777u;
        const u32 first = prmt(m.low, m.high, codes & 0xffffu), second = prmt(m.low, m.high, codes >> 16);
        low = prmt(first, second, 0x6420u) | (word << 4 & 0x80808080u);
        high = prmt(first, second, 0x7531u) | (word & 0x80808080u);
    }
};

// What a row's codes of a run become operands with.
#if !QG_TAKES_SCALES
struct RowCodes {
    ZeroPointBytes offset;

    QG_DEVICE RowCodes of(u32 zero_point) { return {ZeroPointBytes::of(zero_point)}; }
    // Whether operands leave something of a zero point.
    QG_DEVICE bool leaves(u32 zero_point) { return zero_point > 15; }
    // That, its upper nibble, negated, in units.
    QG_DEVICE Sum rest(u32 zero_point) { return (float)(zero_point & 0xf0u) * (-1.0f / UNITS); }

    QG_DEVICE void decode(const RowCodes& row, u32 word, u32, u32& low, u32& high) {
        low = integers_e4m3(word, row.offset);
        high = integers_e4m3(word >> 4, row.offset);
    }
};
#else
struct RowCodes {
    // The exponents of four instructions' scales, bytes, and the largest.
    u32 exponents, largest;

    // By how much the scale of instruction `step` is less than the largest.
    QG_DEVICE u32 lag(const RowCodes& row, u32 step) { return row.largest - (row.exponents >> (8 * step) & 0xffu); }
    QG_DEVICE bool is_far(const RowCodes& row, u32 step) { return lag(row, step) > MOST_LAG; }
    QG_DEVICE void decode(const RowCodes& row, u32 word, u32 step, u32& low, u32& high) {
        const u32 own = lag(row, step);
        Magnitudes::look_up(Magnitudes::of(HALF_EXPONENT - (own < MOST_LAG ? own : MOST_LAG)), word, low, high);
    }
};
#endif

// The A operand of instruction `step` of a run: 32 columns, the first or the second of the k-block. `rows` are the lane's two.
QG_DEVICE void decode_step(u32 (&a)[4], const KTile& columns, u32 step, const RowCodes (&rows)[2]) {
    RowCodes::decode(rows[0], columns.codes0.word[step % 2], step, a[0], a[2]);
    RowCodes::decode(rows[1], columns.codes0.word[2 + step % 2], step, a[1], a[3]);
}

template <u32 COLUMNS, u32 ADDS>
QG_DEVICE void multiply_codes(Sum (&sums)[COLUMNS / 2], const u32 (&a)[4], u64 x) {
    wgmma_k32_e4m3_e4m3<COLUMNS, ADDS>(sums, a, x);
}
// The sum with that of four codes of X.
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
