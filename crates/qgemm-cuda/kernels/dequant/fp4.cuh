// FP4 (E2M1) codes as exact f16 pairs, at twice their value.
#pragma once
#include "dequant/k_tile.cuh"

// Pair `pair` of quad `quad`. The sign bit moves to its place, and the other three bits of a code become the low bits
// of an f16's exponent and the highest bit of its mantissa. That is the number times 2^-14, also in f16's subnormals:
// the biases are 1 and 15. A table was slower (NVFP4, 14336 × 4096, eight tokens on an H200: 24.0 us, and 15.6 us
// without).
QG_DEVICE u32 fp4_pair_f16(const KTile& kt, u32 quad, u32 pair) {
    const u32 word = KTile::Codes0::word_of(kt.codes0, quad);
    // Bits below the code in its half of the word, 12 at most.
    const u32 below = KTile::Codes0::shift(quad, pair);
    const u32 sign = word << (12 - below), rest = below < 12 ? word << (9 - below) : word >> 3;
    return mul_f16x2(and_or(sign, 0x80008000u, rest & 0x0e000e00u), 0x78007800u);
}
