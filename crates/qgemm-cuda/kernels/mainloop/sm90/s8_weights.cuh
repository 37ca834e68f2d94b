// Grouped integers as signed bytes, the operands of `wgmma` on bytes.
//
// Codes of fewer than eight bits less their zero point are bytes, exactly; of eight bits, less 128. What a zero point is beyond 128 acts on
// sums, which are those of integers, exact.
#pragma once
#include "atoms/wgmma_s8_s8.cuh"
#include "dequant/signed_bytes.cuh"
#include "mainloop/sm90/column_words.cuh"

#define QG_TAKES_SCALES 0
// What operands leave of zero points is multiplied with sums of X that a producer makes.
#define QG_SUMS_OF_X 1
static_assert(QG_ZERO_POINTS, "codes have a zero point");
static_assert(QG_SUB_BLOCK % 128 == 0, "sums are scaled once a stage");

// Sums of an instruction, and 1 in units of an accumulator.
using Sum = i32;
constexpr float UNITS = 1.0f;

// The largest zero point that operands take in.
constexpr u32 MOST_TAKEN = 128;

// Registers of a producer, and tokens whose codes a lane adds up at once. Codes that fill a byte want sums of most checkpoints' stages, for which
// loads are under way together (INT8, 4096 tokens on an H200: 1133 us instead of 1695 us). The others want none that is known, and lose with
// eight registers fewer for consumers (INT4: 582 us instead of 552 us).
constexpr u32 PRODUCER_REGISTERS = HAS_WIDE_CODES ? 40 : 24, SUMS_AT_ONCE = HAS_WIDE_CODES ? 2 : 1;

// What a row's codes of a run become operands with.
struct RowCodes {
    // The zero point as bytes.
    u32 offsets;

    QG_DEVICE RowCodes of(u32 zero_point) { return {(zero_point < MOST_TAKEN ? zero_point : MOST_TAKEN) * EACH_BYTE}; }
    // Whether operands leave something of a zero point.
    QG_DEVICE bool leaves(u32 zero_point) { return HAS_WIDE_CODES ? zero_point != MOST_TAKEN : zero_point > MOST_TAKEN; }
    // That, negated.
    QG_DEVICE Sum rest(u32 zero_point) { return leaves(zero_point) ? (i32)MOST_TAKEN - (i32)zero_point : 0; }

    // Codes of quad `quad` of a k-block.
    QG_DEVICE u32 decode(const RowCodes& row, const KTile& columns, u32 quad) {
        const u32 codes = unsigned_bytes(columns, quad);
        return HAS_WIDE_CODES ? codes ^ BYTE_SIGNS : less_bytes(codes, row.offsets);
    }
};

// The A operand of instruction `step` of a run: 32 columns, the first or the second of the k-block. `rows` are the lane's two.
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
