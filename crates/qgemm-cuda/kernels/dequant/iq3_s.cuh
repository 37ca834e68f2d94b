// IQ3_S, sub-blocks of 32:
// d * (2 s + 1) * table[q].
#pragma once
#include "dequant/codebook.cuh"
#include "dequant/grid.cuh"

struct Dequant : GridScale<1> {
    // 1, 3, .., 15, and their negatives.
    QG_DEVICE constexpr Codebook table() { return {{0x87858381u, 0x8f8d8b89u, 0x797b7d7fu, 0x71737577u}}; }
    QG_DEVICE u32 pair_f16(const KTile& kt, u32 quad, u32 pair) {
        return codebook_pair_f16(table(), kt, quad, pair);
    }
};
