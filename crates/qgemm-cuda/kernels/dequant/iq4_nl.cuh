// IQ4_NL: d * table[q].
#pragma once
#include "dequant/codebook.cuh"

struct Dequant {
    static constexpr bool HAS_SCALE = true;
    static constexpr bool HAS_MIN = false;

    QG_DEVICE u32 pair_f16(const Slab& s, u32 quad, u32 pair) {
        constexpr Codebook table = {{0x3f2d1801u, 0x766a5d4fu, 0xa6998d81u, 0xf1d9c5b5u}};
        return codebook_pair_f16(table, s, quad, pair);
    }
    QG_DEVICE float scale(const Slab& s, u32 row, u32 sub) {
        return f16_to_f32(Slab::Scales0::half(s.scales0, row, sub * 2));
    }
};
