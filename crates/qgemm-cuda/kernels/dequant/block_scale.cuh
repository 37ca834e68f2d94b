// Blocks with one f16 scale and no minimum.
// The scales are scale plane 0.
#pragma once
#include "dequant/k_tile.cuh"

struct BlockScale {
    static constexpr bool HAS_SCALE = true;
    static constexpr bool HAS_MIN = false;

    QG_DEVICE float scale(const KTile& kt, u32 row, u32 sub) {
        return f16_to_f32(KTile::Scales0::half(kt.scales0, row, sub * 2));
    }
    QG_DEVICE u32 scale_f16x2(const KTile& kt, u32 row, u32 sub) {
        return KTile::Scales0::half_twice(kt.scales0, row, sub * 2);
    }
};
