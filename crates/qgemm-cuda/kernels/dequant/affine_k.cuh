// Super-blocks of 256 with a scale and a minimum per 32 (Q4_K, Q5_K): d * scale * q - dmin * min.
#pragma once
#include "dequant/integer.cuh"

struct AffineK {
    static constexpr bool HAS_SCALE = true;
    static constexpr bool HAS_MIN = true;

    QG_DEVICE u32 pair_f16(const Slab& s, u32 quad, u32 pair) {
        return integer_pair_f16(s, quad, pair, offset_of(MIDDLE_CODE));
    }
    QG_DEVICE float scale(const Slab& s, u32 row, u32 sub) {
        // Six bits each, eight scales and eight mins in twelve bytes that follow d and dmin.
        if (sub < 4)
            return f16_to_f32(Slab::Scales0::half(s.scales0, row, 0)) *
                   (float)(Slab::Scales0::byte(s.scales0, row, 4 + sub) & 63u);
        const u32 low = Slab::Scales0::byte(s.scales0, row, 8 + sub) & 0xfu;
        const u32 high = Slab::Scales0::byte(s.scales0, row, sub) >> 6;
        return f16_to_f32(Slab::Scales0::half(s.scales0, row, 0)) * (float)(low | high << 4);
    }
    // Added once per sub-block: weight = scale * (code - MIDDLE_CODE) + min.
    QG_DEVICE float min(const Slab& s, u32 row, u32 sub) {
        const float code = (float)code_of_min(s, row, sub);
        return centered_min(-f16_to_f32(Slab::Scales0::half(s.scales0, row, 2)) * code, scale(s, row, sub));
    }

    QG_DEVICE u32 code_of_min(const Slab& s, u32 row, u32 sub) {
        if (sub < 4) return Slab::Scales0::byte(s.scales0, row, 8 + sub) & 63u;
        const u32 low = Slab::Scales0::byte(s.scales0, row, 8 + sub) >> 4;
        const u32 high = Slab::Scales0::byte(s.scales0, row, 4 + sub) >> 6;
        return low | high << 4;
    }
};
