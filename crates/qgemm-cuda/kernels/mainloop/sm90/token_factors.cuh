// Per-token scales of X for a lane's two tokens.
#pragma once
#include "mainloop/fp8_codes.cuh"

struct TokenFactors {
    float value[2];

    // `token` is the lane's first token.
    QG_DEVICE TokenFactors load(const Fp8GemmParams& params, u32 token) {
        TokenFactors factors = {{1.0f, 1.0f}};
        if constexpr (!QG_X_BLOCK_SCALES) load_token_factors(factors.value, params, token);
        return factors;
    }
};

QG_DEVICE void scale_tokens(Accumulators& acc, const TokenFactors& factors) {
    if constexpr (QG_X_BLOCK_SCALES) return;
#pragma unroll
    for (u32 part = 0; part < PARTS; part++)
#pragma unroll
        for (u32 i = 0; i < PART_N / 2; i++) acc.value[part][i] *= factors.value[i / 2 % 2];
}
