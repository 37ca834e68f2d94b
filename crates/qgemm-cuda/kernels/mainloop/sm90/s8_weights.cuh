// Grouped integers as s8 operands of byte `wgmma`.
//
// Codes of less than eight bits minus their zero point fit s8.
// 8-bit codes are reduced by 128.
// The rest of a zero point acts on the exact integer sums.
#pragma once
#include "atoms/wgmma_s8_s8.cuh"
#include "dequant/signed_bytes.cuh"
#include "mainloop/sm90/column_words.cuh"

#define QG_TAKES_SCALES 0
// A producer sums X for the remaining zero points.
#define QG_SUMS_OF_X 1
static_assert(QG_ZERO_POINTS, "codes have a zero point");
static_assert(QG_SUB_BLOCK % 128 == 0, "sums are scaled once a stage");

// Sum type of an instruction, and accumulator units per 1.0.
using Sum = i32;
constexpr float UNITS = 1.0f;

// Largest zero point that operands absorb.
constexpr u32 MOST_TAKEN = 128;

// Producer registers, and tokens that a lane sums at once.
// 8-bit codes usually need X sums in most stages, so several
// loads should be in flight.
// Narrower codes rarely need them, and consumers use the
// registers better.
constexpr u32 PRODUCER_REGISTERS = HAS_WIDE_CODES ? 40 : 24, SUMS_AT_ONCE = HAS_WIDE_CODES ? 2 : 1;

// Conversion of a row's codes to operands.
struct RowCodes {
    // The zero point in each byte.
    u32 offsets;

    QG_DEVICE RowCodes of(u32 zero_point) { return {(zero_point < MOST_TAKEN ? zero_point : MOST_TAKEN) * EACH_BYTE}; }
    // Whether operands do not absorb all of a zero point.
    QG_DEVICE bool leaves(u32 zero_point) { return HAS_WIDE_CODES ? zero_point != MOST_TAKEN : zero_point > MOST_TAKEN; }
    // The part that operands do not absorb, negated.
    QG_DEVICE Sum rest(u32 zero_point) { return leaves(zero_point) ? (i32)MOST_TAKEN - (i32)zero_point : 0; }

    // Codes of quad `quad` of a k-block.
    QG_DEVICE u32 decode(const RowCodes& row, const KTile& columns, u32 quad) {
        const u32 codes = unsigned_bytes(columns, quad);
        return HAS_WIDE_CODES ? codes ^ BYTE_SIGNS : less_bytes(codes, row.offsets);
    }
};

// A operand of instruction `step`: half of a
// k-block, 32 columns.
// `rows` are the lane's two rows.
QG_DEVICE void decode_step(u32 (&a)[4], const KTile& columns, u32 step, const RowCodes (&rows)[2]) {
#pragma unroll
    for (u32 i = 0; i < 4; i++) a[i] = RowCodes::decode(rows[i % 2], columns, quad_of(0, i % 2, step % 2 * 2 + i / 2));
}

template <u32 COLUMNS, u32 ADDS>
QG_DEVICE void multiply_codes(Sum (&sums)[COLUMNS / 2], const u32 (&a)[4], u64 x) {
    wgmma_k32_s8_s8<COLUMNS, ADDS>(sums, a, x);
}
QG_DEVICE Sum add_product(Sum a, Sum b, Sum sum) {
    return sum + a * b;
}
QG_DEVICE float number_of(Sum sum) {
    return (float)sum;
}
