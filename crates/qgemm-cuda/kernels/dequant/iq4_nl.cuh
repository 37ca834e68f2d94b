// IQ4_NL: d * table[q].
#pragma once
#include "dequant/block_scale.cuh"
#include "dequant/codebook.cuh"

struct Dequant : BlockScale {
    QG_DEVICE constexpr Codebook table() { return iq4_table(); }
    QG_DEVICE u32 pair_f16(const KTile& kt, u32 quad, u32 pair) {
        return codebook_pair_f16(table(), kt, quad, pair);
    }
};
