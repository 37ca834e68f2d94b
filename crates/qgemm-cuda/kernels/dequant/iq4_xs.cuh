// IQ4_XS: d * (6-bit scale - 32) * table[q], sub-blocks of 32.
#pragma once
#include "dequant/codebook.cuh"

struct Dequant {
    static constexpr bool HAS_SCALE = true;
    static constexpr bool HAS_MIN = false;

    QG_DEVICE constexpr Codebook table() { return iq4_table(); }
    QG_DEVICE u32 pair_f16(const KTile& kt, u32 quad, u32 pair) {
        return codebook_pair_f16(table(), kt, quad, pair);
    }
    QG_DEVICE float scale(const KTile& kt, u32 row, u32 sub) {
        // Record: d, the upper two bits of eight scales,
        // their low nibbles.
        const u32 low = (KTile::Scales0::byte(kt.scales0, row, 4 + sub / 2) >> (4 * (sub % 2))) & 0xfu;
        const u32 high = (KTile::Scales0::half(kt.scales0, row, 2) >> (2 * sub)) & 3u;
        return f16_to_f32(KTile::Scales0::half(kt.scales0, row, 0)) * (float)((i32)(low | high << 4) - 32);
    }
};
