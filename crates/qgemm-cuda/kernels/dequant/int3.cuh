// Grouped 3-bit integers with a zero point: d * (q - z).
#pragma once
#include "dequant/integer.cuh"

struct Dequant {
    static constexpr bool HAS_SCALE = 1;
    static constexpr bool HAS_MIN = 1;

    QG_DEVICE u32 pair_f16(const Slab& s, u32 quad, u32 pair) {
        return integer_pair_f16<0>(code_pair(s, quad, pair));
    }
    QG_DEVICE float scale(const Slab& s, u32 row, u32 sub) {
        return f16_to_f32(Slab::Scales0::half(s.scales0, row, sub * 2));
    }
    // Added once per sub-block: weight = scale * code + min.
    QG_DEVICE float min(const Slab& s, u32 row, u32 sub) {
        return -f16_to_f32(Slab::Scales0::half(s.scales0, row, sub * 2)) * (float)Slab::Scales1::byte(s.scales1, row, sub);
    }
};
