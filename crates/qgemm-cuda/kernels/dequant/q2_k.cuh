// Q2_K: d * scale * q - dmin * min, sub-blocks of 16.
// Scales and minimums are nibbles.
#pragma once
#include "dequant/byte_scale.cuh"
#include "dequant/integer.cuh"

struct Dequant {
    static constexpr bool HAS_SCALE = true;
    static constexpr bool HAS_MIN = true;

    QG_DEVICE u32 pair_f16(const KTile& kt, u32 quad, u32 pair) {
        return integer_pair_f16(kt, quad, pair, offset_of(MIDDLE_CODE));
    }
    QG_DEVICE float scale(const KTile& kt, u32 row, u32 sub) {
        const float d = f16_to_f32(KTile::Scales1::half(kt.scales1, row, 0));
        return scaled_byte(KTile::Scales0::full(kt.scales0, row, sub / 4 * 4) & LOW_NIBBLES, sub % 4, d);
    }
    // Added once per sub-block:
    // weight = scale * (code - MIDDLE_CODE) + min.
    QG_DEVICE float min(const KTile& kt, u32 row, u32 sub) {
        const float dmin = f16_to_f32(KTile::Scales1::half(kt.scales1, row, 2));
        const u32 bytes = KTile::Scales0::full(kt.scales0, row, sub / 4 * 4) >> 4 & LOW_NIBBLES;
        return centered_min(scaled_byte(bytes, sub % 4, -dmin), scale(kt, row, sub));
    }

    QG_DEVICE float unit(const KTile& kt, u32 row, SuperBlockPart kind) {
        const float unit = f16_to_f32(KTile::Scales1::half(kt.scales1, row, kind == SuperBlockPart::SCALES ? 0 : 2));
        return kind == SuperBlockPart::SCALES ? unit : -unit;
    }
    QG_DEVICE u32 integers(const KTile& kt, u32 row, u32 half, u32 pair, SuperBlockPart kind) {
        const u32 first = KTile::Scales0::full(kt.scales0, row, half * 8);
        const u32 last = KTile::Scales0::full(kt.scales0, row, half * 8 + 4);
        const u32 bytes = byte_pair(first, last, pair);
        return (kind == SuperBlockPart::SCALES ? bytes : bytes >> 4) & LOW_NIBBLES;
    }

    static constexpr u32 LOW_NIBBLES = 0x0f0f0f0fu;
};
