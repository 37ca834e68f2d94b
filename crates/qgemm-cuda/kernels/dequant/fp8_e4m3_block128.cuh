// FP8 E4M3 with 128×128 block scales.
#pragma once
#include "dequant/float8.cuh"

struct Dequant {
    static constexpr bool HAS_SCALE = true;
    static constexpr bool HAS_MIN = false;

    QG_DEVICE u32 pair_f16(const KTile& kt, u32 quad, u32 pair) {
        return e4m3_pair_f16(kt, quad, pair);
    }
    QG_DEVICE float scale(const KTile& kt, u32 row, u32 sub) {
        return bits_to_f32(KTile::Scales0::full(kt.scales0, row, sub * 4));
    }
};
