// f32 weights, stored unquantized.
#pragma once
#include "dequant/k_tile.cuh"

struct Dequant {
    static constexpr bool HAS_SCALE = false;
    static constexpr bool HAS_MIN = false;

    QG_DEVICE void quad_f32(const KTile& kt, u32 quad, float (&w)[4]) {
#pragma unroll
        for (u32 i = 0; i < 4; i++) w[i] = bits_to_f32(kt.codes0.word[quad * 4 + i]);
    }
};
