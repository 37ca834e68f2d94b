// IQ3_XXS, sub-blocks of 32:
// d * (2 s + 1) * table[q] / 4.
#pragma once
#include "dequant/codebook.cuh"
#include "dequant/grid.cuh"

struct Dequant : GridScale<4> {
    // 4, 12, 20, 28, 36, 44, 52, 62, and their
    // negatives.
    QG_DEVICE constexpr Codebook table() { return {{0x9c948c84u, 0xbeb4aca4u, 0x646c747cu, 0x424c545cu}}; }
    QG_DEVICE u32 pair_f16(const KTile& kt, u32 quad, u32 pair) {
        return codebook_pair_f16(table(), kt, quad, pair);
    }
};
