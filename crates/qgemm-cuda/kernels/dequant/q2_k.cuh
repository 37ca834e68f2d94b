// Q2_K: d * (scale nibble) * q - dmin * (min nibble), sub-blocks of 16.
#pragma once
#include "dequant/integer.cuh"

struct Dequant {
    static constexpr bool HAS_SCALE = true;
    static constexpr bool HAS_MIN = true;

    QG_DEVICE u32 pair_f16(const Slab& s, u32 quad, u32 pair) {
        return integer_pair_f16(s, quad, pair, offset_of(MIDDLE_CODE));
    }
    QG_DEVICE float scale(const Slab& s, u32 row, u32 sub) {
        return f16_to_f32(Slab::Scales1::half(s.scales1, row, 0)) * (float)(Slab::Scales0::byte(s.scales0, row, sub) & 0xfu);
    }
    // Added once per sub-block: weight = scale * (code - MIDDLE_CODE) + min.
    QG_DEVICE float min(const Slab& s, u32 row, u32 sub) {
        const float code = (float)(Slab::Scales0::byte(s.scales0, row, sub) >> 4);
        return centered_min(-f16_to_f32(Slab::Scales1::half(s.scales1, row, 2)) * code, scale(s, row, sub));
    }
};
