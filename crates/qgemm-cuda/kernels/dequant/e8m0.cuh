// Scales of one byte that are powers of two.
#pragma once
#include "atoms/e8m0.cuh"
#include "dequant/k_tile.cuh"

// 2^(e - 127), where e is the scale of sub-block `sub`. 255 stands for NaN.
QG_DEVICE float e8m0_scale(const KTile& kt, u32 row, u32 sub) {
    const u32 e = KTile::Scales0::byte(kt.scales0, row, sub);
    return e8m0_to_f32(e);
}
