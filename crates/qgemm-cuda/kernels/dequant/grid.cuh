// Super-blocks of 256 with a nibble s for each
// sub-block: the scale is d * (2 s + 1) /
// DIVISOR.
#pragma once
#include "dequant/k_tile.cuh"

template <u32 DIVISOR>
struct GridScale {
    static constexpr bool HAS_SCALE = true;
    static constexpr bool HAS_MIN = false;

    QG_DEVICE float scale(const KTile& kt, u32 row, u32 sub) {
        const u32 s = (KTile::Scales0::byte(kt.scales0, row, sub / 2) >> (4 * (sub % 2))) & 0xfu;
        return f16_to_f32(KTile::Scales1::half(kt.scales1, row, 0)) * ((float)(2 * s + 1) * (1.0f / DIVISOR));
    }
};
