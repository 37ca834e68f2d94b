// FP8 codes as exact f16 pairs.
#pragma once
#include "atoms/fp8.cuh"
#include "dequant/k_tile.cuh"

// The numbers in the upper bytes of two halves, times 2^-8, exactly (the biases are 7 and 15). The sign is in place;
// the other bits move down by one into exponent and mantissa.
QG_DEVICE u32 e4m3_upper_bytes_f16(u32 upper) {
    return and_or(upper, 0x80008000u, (upper >> 1) & 0x3f803f80u);
}

#if QG_VARIANT >= 89
// Pair `pair` of quad `quad`, by the chip's conversion. NaN stays NaN.
QG_DEVICE u32 e4m3_pair_f16(const KTile& kt, u32 quad, u32 pair) {
    const u32 word = KTile::Codes0::word_of(kt.codes0, quad);
    return cvt_f16x2_e4m3x2(prmt(word, 0, pair == 0 ? 0x4420 : 0x4431));
}
#else
// Pair `pair` of quad `quad`. The two NaN codes come out as +-480.
QG_DEVICE u32 e4m3_pair_f16(const KTile& kt, u32 quad, u32 pair) {
    const u32 word = KTile::Codes0::word_of(kt.codes0, quad);
    return mul_f16x2(e4m3_upper_bytes_f16(pair == 0 ? word << 8 : word), 0x5c005c00u);
}
#endif

// Pair `pair` of quad `quad` of E5M2 codes, which are the upper bytes of f16.
QG_DEVICE u32 e5m2_pair_f16(const KTile& kt, u32 quad, u32 pair) {
    const u32 word = KTile::Codes0::word_of(kt.codes0, quad);
    return (pair == 0 ? word << 8 : word) & 0xff00ff00u;
}
