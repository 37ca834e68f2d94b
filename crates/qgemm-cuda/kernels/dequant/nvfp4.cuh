// NVFP4: (E4M3 scale / 2) · (2 · FP4 value).
// The tensor scale is applied as a row scale.
#pragma once
#include "atoms/e4m3.cuh"
#include "dequant/codebook.cuh"
#include "dequant/fp4.cuh"

// f16 pair of a row's two scales: sub-blocks 2 `pair`
// and 2 `pair` + 1.
// NaN stays NaN.
QG_DEVICE u32 e4m3_scales_f16(const KTile& kt, u32 row, u32 pair) {
    static_assert(KTile::Scales0::ROW_BYTES % 2 == 0, "a pair lies in one word");
    const u32 first = row * KTile::Scales0::ROW_BYTES + pair * 2, word = kt.scales0.word[first / 4];
    return first % 4 == 0 ? e4m3_pair_f16<0, 1>(word) : e4m3_pair_f16<2, 3>(word);
}

struct Dequant {
    static constexpr bool HAS_SCALE = true;
    static constexpr bool HAS_MIN = false;

    QG_DEVICE constexpr Codebook table() { return e2m1_table(); }
    QG_DEVICE u32 pair_f16(const KTile& kt, u32 quad, u32 pair) {
        return fp4_pair_f16(kt, quad, pair);
    }
    QG_DEVICE float scale(const KTile& kt, u32 row, u32 sub) {
        const u32 pair = e4m3_scales_f16(kt, row, sub / 2);
        return f16_to_f32(sub % 2 == 0 ? pair & 0xffffu : pair >> 16) * 0.5f;
    }
};
