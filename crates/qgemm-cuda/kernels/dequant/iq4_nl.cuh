// IQ4_NL: d * table[q].
#pragma once
#include "dequant/block_scale.cuh"
#include "dequant/codebook.cuh"

struct Dequant : BlockScale {
    QG_DEVICE u32 pair_f16(const KTile& kt, u32 quad, u32 pair) {
        constexpr Codebook table = {{0x3f2d1801u, 0x766a5d4fu, 0xa6998d81u, 0xf1d9c5b5u}};
        return codebook_pair_f16(table, kt, quad, pair);
    }
};
