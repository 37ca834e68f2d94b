// f16 weights, stored unquantized.
#pragma once
#include "dequant/k_tile.cuh"

struct Dequant {
    static constexpr bool HAS_SCALE = false;
    static constexpr bool HAS_MIN = false;

    QG_DEVICE u32 pair_f16(const KTile& kt, u32 quad, u32 pair) {
        return kt.codes0.word[quad * 2 + pair];
    }
};
