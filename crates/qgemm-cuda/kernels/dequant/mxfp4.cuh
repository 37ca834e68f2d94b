// MXFP4: 2^(e - 128) · (2 · FP4 value).
#pragma once
#include "dequant/codebook.cuh"
#include "dequant/e8m0.cuh"
#include "dequant/fp4.cuh"

struct Dequant {
    static constexpr bool HAS_SCALE = true;
    static constexpr bool HAS_MIN = false;
    static constexpr bool HAS_WIDE_SCALES = true;

    QG_DEVICE constexpr Codebook table() { return e2m1_table(); }
    QG_DEVICE u32 pair_f16(const KTile& kt, u32 quad, u32 pair) {
        return fp4_pair_f16(kt, quad, pair);
    }
    QG_DEVICE float scale(const KTile& kt, u32 row, u32 sub) {
        return e8m0_scale(kt, row, sub) * 0.5f;
    }
};
