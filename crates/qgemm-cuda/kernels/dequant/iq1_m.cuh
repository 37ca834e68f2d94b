// IQ1_M, sub-blocks of 16:
// d * (2 s + 1) * table[q] / 8.
#pragma once
#include "dequant/codebook8.cuh"
#include "dequant/grid.cuh"

struct Dequant : GridScale<8> {
    // -7, 1, 9; -9, -1, 7.
    QG_DEVICE constexpr Codebook8 table() { return {{0x89898179u, 0x87877f77u}}; }
    QG_DEVICE u32 pair_f16(const KTile& kt, u32 quad, u32 pair) {
        return codebook_pair_f16(table(), kt, quad, pair);
    }
};
