// FP8 E4M3 with per-row scales.
#pragma once
#include "dequant/float8.cuh"

struct Dequant {
    static constexpr bool HAS_SCALE = false;
    static constexpr bool HAS_MIN = false;

    QG_DEVICE u32 pair_f16(const KTile& kt, u32 quad, u32 pair) {
        return e4m3_pair_f16(kt, quad, pair);
    }
};
