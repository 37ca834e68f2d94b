// bf16 weights, stored unquantized.
#pragma once
#include "dequant/k_tile.cuh"

struct Dequant {
    static constexpr bool HAS_SCALE = false;
    static constexpr bool HAS_MIN = false;

    QG_DEVICE u32 pair_bf16(const KTile& kt, u32 quad, u32 pair) {
        return kt.codes0.word[quad * 2 + pair];
    }
    // Named by loops that scale weights in f16 or bf16.
    // Never called: plain weights have no scale.
    QG_DEVICE u32 pair_f16(const KTile& kt, u32 quad, u32 pair) {
        const u32 bits = kt.codes0.word[quad * 2 + pair];
        return f32_to_f16(bf16_to_f32(bits & 0xffffu)) | f32_to_f16(bf16_to_f32(bits >> 16)) << 16;
    }
    QG_DEVICE void quad_f32(const KTile& kt, u32 quad, float (&w)[4]) {
#pragma unroll
        for (u32 pair = 0; pair < 2; pair++) {
            const u32 bits = kt.codes0.word[quad * 2 + pair];
            w[pair * 2] = bits_to_f32(bits << 16);
            w[pair * 2 + 1] = bits_to_f32(bits & 0xffff0000u);
        }
    }
};
