// MXFP4: 2^(e - 128) * twice the fp4 value.
#pragma once
#include "dequant/codebook.cuh"
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
        const u32 e = KTile::Scales0::byte(kt.scales0, row, sub);
        // For e below 2 the scale is subnormal in f32.
        return bits_to_f32(e < 2 ? 0x00200000u << e : (e - 1) << 23);
    }
};
