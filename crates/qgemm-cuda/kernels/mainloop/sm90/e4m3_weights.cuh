// Weights of four bits as E4M3 operands of `wgmma`, from the registers that hold their packed codes.
//
// A lane holds columns 16s + {2t, 2t+1, 2t+8, 2t+9} of its two rows, which instructions on 16 bits want; those on bytes want columns
// 4t..4t+3 of each 16. X lies in natural order, so the four lanes of a row exchange halves of their words. The upper
// nibble of each byte belongs to the column 16 after that of the lower one, and passes with it.
//
// E4M3 numbers below 2^-4 are integers times 2^-9: bytes up to 16 are worth as many units. E2M1 codes, moved up by two
// bits, are their numbers times 2^-6. Either is exact, and accumulators are brought back to numbers at the end.
#pragma once
#include "atoms/warp.cuh"
#include "dequant/operand.cuh"

// 1 in units of an accumulator.
constexpr float E4M3_UNITS = QG_ZERO_POINTS ? 512.0f : 128.0f;
static_assert(KTile::Codes0::BITS == 4 && QG_CODE_PLANES == 1, "codes are nibbles");

// How a lane exchanges columns with the three others of its rows.
struct ColumnExchange {
    u32 first_lane, second_lane;
    // Bytes that it gives first (and, with every bit 0 turned over, second), and how it puts together those that it takes.
    u32 give, take;

    QG_DEVICE ColumnExchange of_lane(u32 lane) {
        const u32 t = lane % 4, even = lane - t + 2 * t % 4;
        const bool is_low = t < 2;
        return {is_low ? even : even + 1, is_low ? even + 1 : even, lane % 2 == 0 ? 0x6420u : 0x7531u,
                is_low ? 0x5410u : 0x1054u};
    }
    // Words of the lane's two rows, from the packed order v0 v2 v1 v3 of bytes to columns 4t..4t+3.
    QG_DEVICE void exchange(const ColumnExchange& e, u32& upper, u32& lower) {
        const u32 first = shfl_idx_u32(prmt(upper, lower, e.give), e.first_lane);
        const u32 second = shfl_idx_u32(prmt(upper, lower, e.give ^ 0x1111u), e.second_lane);
        upper = prmt(first, second, e.take);
        lower = prmt(first, second, e.take + 0x2222u);
    }
};

// What codes are less of, a byte each: 32 - zero point, so that the bytes of a sum stay positive.
QG_DEVICE u32 offset_bytes(u32 zero_point) {
    return 0x20202020u - (zero_point & 15u) * 0x01010101u;
}

// Integers of the low nibbles of `codes`, less their zero point, as sign and magnitude.
QG_DEVICE u32 integers_e4m3(u32 codes, u32 offset) {
    const u32 biased = (codes & 0x0f0f0f0fu) + offset;
    const u32 negative = ~biased >> 5 & 0x01010101u;
    return ((biased & 0x1f1f1f1fu) ^ negative * 31u) + negative * 129u;
}

// The operands of a row, two registers of 16 columns each, from a word in the order of columns.
QG_DEVICE void row_operands(u32 word, u32 offset, u32& low, u32& high) {
    if constexpr (QG_ZERO_POINTS) {
        low = integers_e4m3(word, offset);
        high = integers_e4m3(word >> 4, offset);
    } else {
        low = (word & 0x08080808u) << 4 | (word & 0x07070707u) << 2;
        high = and_or(word >> 2, 0x1c1c1c1cu, word & 0x80808080u);
    }
}

// The zero point of a row in a block, of formats that have one.
template <class D>
QG_DEVICE u32 zero_point_of(const KTile& k_tile, u32 row, u32 sub) {
    if constexpr (QG_ZERO_POINTS) return D::zero_point(k_tile, row, sub);
    return 0;
}

// The A operand of an instruction: 32 columns from `step` of the k-tile on. `offset` is of the lane's two rows.
QG_DEVICE void weights_e4m3(u32 (&a)[4], const KTile& k_tile, u32 step, const u32 (&offset)[2], const ColumnExchange& e) {
    // A k-block of 64 columns has two words of the first row, then two of the second.
    const u32 first = step / 2 * 4 + step % 2;
    u32 upper = k_tile.codes0.word[first], lower = k_tile.codes0.word[first + 2];
    ColumnExchange::exchange(e, upper, lower);
    row_operands(upper, offset[0], a[0], a[2]);
    row_operands(lower, offset[1], a[1], a[3]);
}
