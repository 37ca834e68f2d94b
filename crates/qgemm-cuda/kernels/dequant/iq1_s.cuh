// IQ1_S, sub-blocks of 32:
// d * (2 s + 1) * (q - 7/8 or 9/8).
// Nibbles hold s and, above it, a bit that is set for 9/8.
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
        return f16_to_f32(KTile::Scales1::half(kt.scales1, row, 0)) * (float)(2 * (nibble(kt, row, sub) & 7u) + 1);
    }
    // Added once per sub-block:
    // weight = scale * (code - MIDDLE_CODE) + min.
    QG_DEVICE float min(const KTile& kt, u32 row, u32 sub) {
        const float of_code = scale(kt, row, sub);
        return centered_min(nibble(kt, row, sub) < 8 ? -0.875f * of_code : -1.125f * of_code, of_code);
    }

    QG_DEVICE float unit(const KTile& kt, u32 row, SuperBlockPart kind) {
        const float unit = f16_to_f32(KTile::Scales1::half(kt.scales1, row, 0));
        return kind == SuperBlockPart::SCALES ? unit : -0.125f * unit;
    }
    QG_DEVICE u32 integers(const KTile& kt, u32 row, u32, u32 pair, SuperBlockPart kind) {
        const u32 both = KTile::Scales0::full(kt.scales0, row, 0) >> 8 * pair;
        const u32 nibbles = (both & 0x0fu) | (both & 0xf0u) << 4;
        const u32 scales = (nibbles & 0x0707u) << 1 | 0x0101u;
        if (kind == SuperBlockPart::SCALES) return scales;
        // Seven or nine times the scale.
        const u32 nine = (nibbles >> 3 & 0x0101u) * 0xffu;
        return scales * 7 + (scales << 1 & nine);
    }

    QG_DEVICE u32 nibble(const KTile& kt, u32 row, u32 sub) {
        return (KTile::Scales0::byte(kt.scales0, row, sub / 2) >> (4 * (sub % 2))) & 0xfu;
    }
};
