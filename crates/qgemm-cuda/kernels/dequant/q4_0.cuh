// Q4_0: d * (q - 8).
#pragma once
#include "dequant/integer.cuh"

struct Dequant {
    static constexpr bool HAS_SCALE = true;
    static constexpr bool HAS_MIN = false;

    QG_DEVICE u32 pair_f16(const Slab& s, u32 quad, u32 pair) {
        return integer_pair_f16(s, quad, pair, offset_of(8));
    }
    QG_DEVICE float scale(const Slab& s, u32 row, u32 sub) {
        return f16_to_f32(Slab::Scales0::half(s.scales0, row, sub * 2));
    }
};
