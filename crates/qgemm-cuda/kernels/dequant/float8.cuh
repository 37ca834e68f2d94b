// FP8 E4M3 codes made into f16 pairs exactly.
#pragma once
#include "dequant/slab.cuh"

// Both types keep the sign on top; moved to f16's exponent field, e4m3 is 2^8 too small (biases 15 and 7).
// The two NaN codes come out as +-480.
QG_DEVICE u32 e4m3_pair_f16(u32 codes) {
    const u32 moved = ((codes & 0x00800080u) << 8) | ((codes & 0x007f007fu) << 7);
    return mul_f16x2(moved, 0x5c005c00u);
}
