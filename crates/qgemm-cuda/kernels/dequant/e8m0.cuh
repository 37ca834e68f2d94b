// Scales of one byte that are powers of two.
#pragma once
#include "dequant/k_tile.cuh"

// 2^(e - 127), where e is the scale of sub-block `sub`.
QG_DEVICE float e8m0_scale(const KTile& kt, u32 row, u32 sub) {
    const u32 e = KTile::Scales0::byte(kt.scales0, row, sub);
    // For e = 0 the scale is subnormal in f32.
    return bits_to_f32(e == 0 ? 0x00400000u : e << 23);
}
