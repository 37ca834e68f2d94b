// Super-blocks of 256 with a scale and a minimum per 32 (Q4_K, Q5_K): d * scale * q - dmin * min.
#pragma once
#include "dequant/byte_scale.cuh"
#include "dequant/integer.cuh"

struct AffineK {
    static constexpr bool HAS_SCALE = true;
    static constexpr bool HAS_MIN = true;

    QG_DEVICE u32 pair_f16(const Slab& s, u32 quad, u32 pair) {
        return integer_pair_f16(s, quad, pair, offset_of(MIDDLE_CODE));
    }
    // Six bits each, eight scales and eight minimums in the twelve bytes that follow d and dmin: the first four of both in
    // the low bits of four bytes, the others' nibbles in the last four, their upper bits above the first.
    QG_DEVICE float scale(const Slab& s, u32 row, u32 sub) {
        const u32 first = Slab::Scales0::full(s.scales0, row, 4), nibbles = Slab::Scales0::full(s.scales0, row, 12);
        const u32 bytes = sub < 4 ? first & FIRST_FOUR : and_or(first >> 2, UPPER_BITS, nibbles & LOW_NIBBLES);
        return scaled_byte(bytes, sub % 4, f16_to_f32(Slab::Scales0::half(s.scales0, row, 0)));
    }
    // Added once per sub-block: weight = scale * (code - MIDDLE_CODE) + min.
    QG_DEVICE float min(const Slab& s, u32 row, u32 sub) {
        const u32 first = Slab::Scales0::full(s.scales0, row, 8), nibbles = Slab::Scales0::full(s.scales0, row, 12);
        const u32 bytes = sub < 4 ? first & FIRST_FOUR : and_or(first >> 2, UPPER_BITS, nibbles >> 4 & LOW_NIBBLES);
        const float dmin = f16_to_f32(Slab::Scales0::half(s.scales0, row, 2));
        return centered_min(scaled_byte(bytes, sub % 4, -dmin), scale(s, row, sub));
    }

    static constexpr u32 FIRST_FOUR = 0x3f3f3f3fu, UPPER_BITS = 0x30303030u, LOW_NIBBLES = 0x0f0f0f0fu;
};
