// NVFP4: e4m3 / 2 * table[q]; the table holds twice the fp4 values. The tensor scale is a row scale.
#pragma once
#include "dequant/codebook.cuh"

struct Dequant {
    static constexpr bool HAS_SCALE = true;
    static constexpr bool HAS_MIN = false;

    QG_DEVICE u32 pair_f16(const Slab& s, u32 quad, u32 pair) {
        constexpr Codebook table = {{0x83828180u, 0x8c888684u, 0x7d7e7f80u, 0x74787a7cu}};
        return codebook_pair_f16(table, s, quad, pair);
    }
    QG_DEVICE float scale(const Slab& s, u32 row, u32 sub) {
        return e4m3_to_f32(Slab::Scales0::byte(s.scales0, row, sub)) * 0.5f;
    }
};
