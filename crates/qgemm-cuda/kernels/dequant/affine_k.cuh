// Q4_K, Q5_K: super-blocks of 256.
// Each 32 values have a scale and a minimum:
// d * scale * q - dmin * min.
#pragma once
#include "dequant/byte_scale.cuh"
#include "dequant/integer.cuh"

struct AffineK {
    static constexpr bool HAS_SCALE = true;
    static constexpr bool HAS_MIN = true;

    QG_DEVICE u32 pair_f16(const KTile& kt, u32 quad, u32 pair) {
        return integer_pair_f16(kt, quad, pair, offset_of(MIDDLE_CODE));
    }
    QG_DEVICE float scale(const KTile& kt, u32 row, u32 sub) {
        const float d = f16_to_f32(KTile::Scales0::half(kt.scales0, row, 0));
        return scaled_byte(six_bits(kt, row, sub, 4, 0), sub % 4, d);
    }
    // Added once per sub-block:
    // weight = scale * (code - MIDDLE_CODE) + min.
    QG_DEVICE float min(const KTile& kt, u32 row, u32 sub) {
        const float dmin = f16_to_f32(KTile::Scales0::half(kt.scales0, row, 2));
        return centered_min(scaled_byte(six_bits(kt, row, sub, 8, 4), sub % 4, -dmin), scale(kt, row, sub));
    }

    QG_DEVICE float unit(const KTile& kt, u32 row, SuperBlockPart kind) {
        const float unit = f16_to_f32(KTile::Scales0::half(kt.scales0, row, kind == SuperBlockPart::SCALES ? 0 : 2));
        return kind == SuperBlockPart::SCALES ? unit : -unit;
    }
    QG_DEVICE u32 integers(const KTile& kt, u32 row, u32, u32 pair, SuperBlockPart kind) {
        const u32 first = kind == SuperBlockPart::SCALES ? 4 : 8, nibble = kind == SuperBlockPart::SCALES ? 0 : 4;
        return byte_pair(six_bits(kt, row, 0, first, nibble), six_bits(kt, row, 4, first, nibble), pair);
    }

    // The four 6-bit scales or minimums around `sub`, one a byte.
    // Twelve bytes after d and dmin hold eight scales
    // and eight minimums.
    // Values 0..3 are the low six bits of the bytes at `first`.
    // Values 4..7 have their upper two bits above these bits.
    // Their low nibbles are in the last four bytes, at bit `nibble`.
    QG_DEVICE u32 six_bits(const KTile& kt, u32 row, u32 sub, u32 first, u32 nibble) {
        const u32 bytes = KTile::Scales0::full(kt.scales0, row, first);
        if (sub < 4) return bytes & 0x3f3f3f3fu;
        return and_or(bytes >> 2, 0x30303030u, KTile::Scales0::full(kt.scales0, row, 12) >> nibble & 0x0f0f0f0fu);
    }
};
