// 4-bit codes minus their zero point, exact in the type of X.
// Scales act on the accumulators.
#pragma once
#include "atoms/bf16_pairs.cuh"
#include "dequant/operand.cuh"

static_assert(QG_CODE_PLANES == 1 && KTile::Codes0::BITS == 4, "zero points lie among the codes");

QG_DEVICE u32 exact_pair(const KTile& k_tile, u32 quad, u32 pair) {
#if QG_X_DTYPE == 1
    return Operands::pair_f16(k_tile, quad, pair);
#else
    // 128 + code and 128 + zero point are exact in bf16, and so is
    // their difference.
    using Codes = KTile::Codes0;
    const u32 zero_point = Operands::Format::zero_point(k_tile, row_of(quad), column_of(quad) / QG_SUB_BLOCK);
    const u32 biased = and_or(Codes::word_of(k_tile.codes0, quad) >> Codes::shift(quad, pair), Codes::MASK, 0x43004300u);
    return sub_bf16x2(biased, (0x4300u + zero_point) * 0x00010001u);
#endif
}
