// MXFP8 (E4M3): 2^(e - 127) * value.
#pragma once
#include "dequant/e8m0.cuh"
#include "dequant/float8.cuh"

struct Dequant {
    static constexpr bool HAS_SCALE = true;
    static constexpr bool HAS_MIN = false;

    QG_DEVICE u32 pair_f16(const KTile& kt, u32 quad, u32 pair) {
        return e4m3_pair_f16(kt, quad, pair);
    }
    QG_DEVICE float scale(const KTile& kt, u32 row, u32 sub) {
        return e8m0_scale(kt, row, sub);
    }
};
