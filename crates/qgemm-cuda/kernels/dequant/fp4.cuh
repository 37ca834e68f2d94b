// FP4 (E2M1) codes made into f16 pairs exactly, at twice their value.
#pragma once
#include "dequant/k_tile.cuh"

// Pair `pair` of quad `quad`. With its sign in place, a code's other three bits become the low bits of an f16's exponent and the
// highest of its mantissa. That is the number times 2^-14, in f16's subnormals, too: the biases are 1 and 15. (Looked up in a
// table, NVFP4 of 14336 x 4096 took an H200 24.0 us for eight tokens, 15.6 so.)
QG_DEVICE u32 fp4_pair_f16(const KTile& kt, u32 quad, u32 pair) {
    const u32 word = KTile::Codes0::word_of(kt.codes0, quad);
    // Bits below the code's in its half of the word, 12 at most.
    const u32 below = KTile::Codes0::shift(quad, pair);
    const u32 sign = word << (12 - below), rest = below < 12 ? word << (9 - below) : word >> 3;
    return mul_f16x2(and_or(sign, 0x80008000u, rest & 0x0e000e00u), 0x78007800u);
}
