// Q3_K, sub-blocks of 16:
// d * (6-bit scale - 32) * (q - 4).
#pragma once
#include "dequant/byte_scale.cuh"
#include "dequant/integer.cuh"

struct Dequant {
    static constexpr bool HAS_SCALE = true;
    static constexpr bool HAS_MIN = false;
    static constexpr u32 OFFSET = 4;

    QG_DEVICE u32 pair_f16(const KTile& kt, u32 quad, u32 pair) {
        return integer_pair_f16(kt, quad, pair, offset_of(OFFSET));
    }
    QG_DEVICE float scale(const KTile& kt, u32 row, u32 sub) {
        // Twelve bytes: eight with the low nibbles of 16 scales, four
        // with their upper two bits.
        const u32 low = KTile::Scales0::full(kt.scales0, row, sub % 8 / 4 * 4) >> 4 * (sub / 8);
        const u32 high = KTile::Scales0::full(kt.scales0, row, 8), from = 2 * (sub / 4);
        const u32 bytes = and_or(from < 4 ? high << (4 - from) : high >> (from - 4), 0x30303030u, low & 0x0f0f0f0fu);
        return scaled_byte<32>(bytes, sub % 4, f16_to_f32(KTile::Scales1::half(kt.scales1, row, 0)));
    }
};
