// Pairs of E4M3 numbers as f16 pairs, exactly, on chips whose instructions take none.
#pragma once
#include "atoms/numeric.cuh"

// Two codes, each the upper byte of a half, as f16 pairs. Their bits are those of an f16 that is 256 times less, and the code of NaN is
// that of 480, which is no other number's.
QG_DEVICE u32 decoded_pair(u32 codes) {
    const u32 pair = mul_f16x2((codes & 0x80008000u) | ((codes & 0x7f007f00u) >> 1), 0x5c005c00u);
    const u32 nan_low = (pair & 0x7fffu) == 0x5f80u ? 0x7fffu : 0, nan_high = (pair & 0x7fff0000u) == 0x5f800000u ? 0x7fff0000u : 0;
    return pair | nan_low | nan_high;
}
