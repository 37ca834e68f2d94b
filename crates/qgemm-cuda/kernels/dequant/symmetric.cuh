// Q4_0, Q5_0, Q8_0: d * (q - OFFSET).
#pragma once
#include "dequant/block_scale.cuh"
#include "dequant/integer.cuh"

template <u32 CODE_OFFSET>
struct Symmetric : BlockScale {
    static constexpr u32 OFFSET = CODE_OFFSET;

    QG_DEVICE u32 pair_f16(const KTile& kt, u32 quad, u32 pair) {
        return integer_pair_f16(kt, quad, pair, offset_of(OFFSET));
    }
};
