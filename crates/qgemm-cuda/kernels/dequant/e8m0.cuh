// Power-of-two scales (UE8M0).
#pragma once
#include "atoms/e8m0.cuh"
#include "dequant/k_tile.cuh"

// Scale 2^(e - 127) of sub-block `sub`; NaN for e = 255.
QG_DEVICE float e8m0_scale(const KTile& kt, u32 row, u32 sub) {
    const u32 e = KTile::Scales0::byte(kt.scales0, row, sub);
    return e8m0_to_f32(e);
}
