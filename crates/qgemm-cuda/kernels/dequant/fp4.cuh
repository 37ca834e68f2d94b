// FP4 (E2M1) codes as exact f16 pairs, at twice their value.
#pragma once
#include "dequant/k_tile.cuh"

// Pair `pair` of quad `quad`.
// The sign bit moves to bit 15.
// Exponent and mantissa become low exponent bits and the top
// mantissa bit of an f16.
// This f16 is the value times 2^-14, also for subnormals,
// because the exponent biases are 1 and 15.
// A table lookup is slower.
QG_DEVICE u32 fp4_pair_f16(const KTile& kt, u32 quad, u32 pair) {
    const u32 word = KTile::Codes0::word_of(kt.codes0, quad);
    // Bits below the code in its half-word, at most 12.
    const u32 below = KTile::Codes0::shift(quad, pair);
    const u32 sign = word << (12 - below), rest = below < 12 ? word << (9 - below) : word >> 3;
    return mul_f16x2(and_or(sign, 0x80008000u, rest & 0x0e000e00u), 0x78007800u);
}
