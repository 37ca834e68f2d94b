// f16 weights: a code is the number itself.
#pragma once
#include "dequant/k_tile.cuh"

struct Dequant {
    static constexpr bool HAS_SCALE = false;
    static constexpr bool HAS_MIN = false;

    QG_DEVICE u32 pair_f16(const KTile& kt, u32 quad, u32 pair) {
        return kt.codes0.word[quad * 2 + pair];
    }
};
