// Grouped unsigned integers with zero points (GPTQ,
// AWQ): d * (q - z).
// The exact difference enters the product.
// Integer operands instead correct the sums.
#pragma once
#include "dequant/block_scale.cuh"
#include "dequant/integer.cuh"

struct ZeroPoint : BlockScale {
    QG_DEVICE u32 pair_f16(const KTile& kt, u32 quad, u32 pair) {
        const u32 group = column_of(quad) / QG_SUB_BLOCK;
        return integer_pair_f16(kt, quad, pair, offset_of(zero_point(kt, row_of(quad), group)));
    }
    QG_DEVICE u32 zero_point(const KTile& kt, u32 row, u32 sub) { return KTile::Scales1::byte(kt.scales1, row, sub); }
};
