// RMS norm of query and key heads that lanes share,
// eight features a lane.
#pragma once
#include "atoms/float.cuh"
#include "atoms/reciprocal_root.cuh"
#include "atoms/warp.cuh"
#include "attention/problem.cuh"

// Gamma of queries, then of keys, in shared memory.
struct Gammas {
    float of[2][256];
};

// Threads share the loads; a CTA barrier must follow.
QG_DEVICE void write_gammas(const KvAppendPointers& at, u32 columns, Gammas& gammas) {
    const u32 width = at.head_lanes * 8;
    for (u32 i = thread_index(); i < 2 * width; i += cta_threads()) {
        const bool is_query = i < width;
        const u64 address = is_query ? at.q_gamma : at.k_gamma;
        const u32 column = is_query ? i : i - width;
        float gamma = 0.0f;
        if (address && column < columns) {
            if (at.gamma_dtype == DTYPE_F32) {
                gamma = bits_to_f32(index_at(address, column));
            } else {
                const u32 half = ld_global_u16(reinterpret_cast<const u8*>(address) + column * 2);
                gamma = at.gamma_dtype == DTYPE_F16 ? f16_to_f32(half) : bf16_to_f32(half);
            }
        }
        st_shared(&gammas.of[is_query ? 0 : 1][column], gamma);
    }
}

// Lanes without a feature hold zeros. `is_any`: whether the
// lane's head is a query or a key. Warp-collective.
QG_DEVICE void normalize_head(float (&x)[8], const KvAppendPointers& at, const Gammas& gammas, u32 column, bool is_query, bool is_any) {
    float squares = 0.0f;
#pragma unroll
    for (u32 i = 0; i < 8; i++) squares = fma_f32(x[i], x[i], squares);
#pragma unroll 1
    for (u32 mask = 1; mask < at.head_lanes; mask *= 2) squares += shfl_xor(squares, mask);
    if (!is_any) return;
    const float factor = rsqrt_approx(fma_f32(squares, at.head_inverse, at.eps));
#pragma unroll
    for (u32 i = 0; i < 8; i++) x[i] *= factor * ld_shared(&gammas.of[is_query ? 0 : 1][column + i]);
}
