// FP8 codes as exact f16 pairs.
#pragma once
#include "atoms/e4m3.cuh"
#include "dequant/k_tile.cuh"

// Pair `pair` of E4M3 quad `quad`. NaN stays NaN.
QG_DEVICE u32 e4m3_pair_f16(const KTile& kt, u32 quad, u32 pair) {
    const u32 word = KTile::Codes0::word_of(kt.codes0, quad);
    return pair == 0 ? e4m3_pair_f16<0, 2>(word) : e4m3_pair_f16<1, 3>(word);
}

// Pair `pair` of E5M2 quad `quad`.
// An E5M2 code is the upper byte of an f16.
QG_DEVICE u32 e5m2_pair_f16(const KTile& kt, u32 quad, u32 pair) {
    const u32 word = KTile::Codes0::word_of(kt.codes0, quad);
    return (pair == 0 ? word << 8 : word) & 0xff00ff00u;
}
