// FP8 E5M2 scaled per 128 x 128 block.
#pragma once
#include "dequant/float8.cuh"

struct Dequant {
    static constexpr bool HAS_SCALE = true;
    static constexpr bool HAS_MIN = false;

    QG_DEVICE u32 pair_f16(const KTile& kt, u32 quad, u32 pair) {
        // E5M2 is the upper byte of f16.
        const u32 word = KTile::Codes0::word_of(kt.codes0, quad);
        return (pair == 0 ? word << 8 : word) & 0xff00ff00u;
    }
    QG_DEVICE float scale(const KTile& kt, u32 row, u32 sub) {
        return bits_to_f32(KTile::Scales0::full(kt.scales0, row, sub * 4));
    }
};
