// Q4_1, Q5_1, affine groups: an f16 scale and
// minimum, d * q + m.
#pragma once
#include "dequant/integer.cuh"

struct Affine {
    static constexpr bool HAS_SCALE = true;
    static constexpr bool HAS_MIN = true;

    QG_DEVICE u32 pair_f16(const KTile& kt, u32 quad, u32 pair) {
        return integer_pair_f16(kt, quad, pair, offset_of(MIDDLE_CODE));
    }
    QG_DEVICE float scale(const KTile& kt, u32 row, u32 sub) {
        return f16_to_f32(KTile::Scales0::half(kt.scales0, row, sub * 4));
    }
    // Added once per sub-block:
    // weight = scale * (code - MIDDLE_CODE) + min.
    QG_DEVICE float min(const KTile& kt, u32 row, u32 sub) {
        return centered_min(f16_to_f32(KTile::Scales0::half(kt.scales0, row, sub * 4 + 2)), scale(kt, row, sub));
    }
};

// The minimum record is the value of code CENTER:
// d * (q - CENTER) + m.
template <u32 CENTER>
struct CenteredAffine : Affine {
    QG_DEVICE float min(const KTile& kt, u32 row, u32 sub) {
        const float addend = f16_to_f32(KTile::Scales0::half(kt.scales0, row, sub * 4 + 2));
        if constexpr (MIDDLE_CODE == CENTER) return addend;
        return ((float)MIDDLE_CODE - (float)CENTER) * Affine::scale(kt, row, sub) + addend;
    }
};
