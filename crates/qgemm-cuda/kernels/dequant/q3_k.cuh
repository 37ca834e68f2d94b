// Q3_K: d * (6-bit scale - 32) * (q - 4), sub-blocks of 16.
#pragma once
#include "dequant/integer.cuh"

struct Dequant {
    static constexpr bool HAS_SCALE = true;
    static constexpr bool HAS_MIN = false;

    QG_DEVICE u32 pair_f16(const Slab& s, u32 quad, u32 pair) {
        return integer_pair_f16(s, quad, pair, offset_of(4));
    }
    QG_DEVICE float scale(const Slab& s, u32 row, u32 sub) {
        // Twelve bytes: the low nibbles of 16 scales in the first eight, their upper two bits in the last four.
        const u32 low = (Slab::Scales0::byte(s.scales0, row, sub % 8) >> (4 * (sub / 8))) & 0xfu;
        const u32 high = (Slab::Scales0::byte(s.scales0, row, 8 + sub % 4) >> (2 * (sub / 4))) & 3u;
        return f16_to_f32(Slab::Scales1::half(s.scales1, row, 0)) * (float)((i32)(low | high << 4) - 32);
    }
};
