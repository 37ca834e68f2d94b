// Q6_K: d * (s8 scale) * (q - 32).
// Sub-blocks of 16.
#pragma once
#include "dequant/byte_scale.cuh"
#include "dequant/integer.cuh"

struct Dequant {
    static constexpr bool HAS_SCALE = true;
    static constexpr bool HAS_MIN = false;
    static constexpr u32 OFFSET = 32;

    QG_DEVICE u32 pair_f16(const KTile& kt, u32 quad, u32 pair) {
        return integer_pair_f16(kt, quad, pair, offset_of(OFFSET));
    }
    QG_DEVICE float scale(const KTile& kt, u32 row, u32 sub) {
        // Flipped sign bits turn s8 into u8 with an offset of 128.
        const u32 bytes = KTile::Scales0::full(kt.scales0, row, sub / 4 * 4) ^ 0x80808080u;
        return scaled_byte<128>(bytes, sub % 4, f16_to_f32(KTile::Scales1::half(kt.scales1, row, 0)));
    }
};
