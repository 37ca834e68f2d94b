// IQ2, sub-blocks of 16:
// d * (2 s + 1) * table[q] / 8.
#pragma once
#include "dequant/codebook8.cuh"
#include "dequant/grid.cuh"

struct Dequant : GridScale<8> {
    // 8, 25, 43, and their negatives.
    QG_DEVICE constexpr Codebook8 table() { return {{0xabab9988u, 0x55556778u}}; }
    QG_DEVICE u32 pair_f16(const KTile& kt, u32 quad, u32 pair) {
        return codebook_pair_f16(table(), kt, quad, pair);
    }
};
