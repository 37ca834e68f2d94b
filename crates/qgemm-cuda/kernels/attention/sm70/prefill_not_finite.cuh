// Prefill: infinities and NaN in values of mixed tiles.
#pragma once
#include "attention/sm70/prefill_rows.cuh"

QG_DEVICE bool is_finite(u32 half) {
    constexpr u32 EXPONENT = QG_KV == DTYPE_BF16 ? 0x7f80u : 0x7c00u;
    return (half & EXPONENT) != EXPONENT;
}

// Replaces infinities and NaN in V by zeros
// and records their keys. A masked value must
// not reach a query through 0 · inf = NaN.
QG_DEVICE void zero_not_finite(SharedStorage& shared) {
    const u32 lane = thread_index() % 32;
    for (u32 key = thread_index() / 32; key < QG_KEYS; key += WARPS) {
        bool found = false;
        if (lane < QG_V / 8) {
            u32x4* at = reinterpret_cast<u32x4*>(shared.v + key * V_PITCH + lane * 16);
            const u32x4 v = ld_shared(at);
            u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
            for (u32 i = 0; i < 4; i++) {
                if (!is_finite(words[i])) words[i] &= 0xffff0000u, found = true;
                if (!is_finite(words[i] >> 16)) words[i] &= 0xffffu, found = true;
            }
            if (found) st_shared(at, {words[0], words[1], words[2], words[3]});
        }
        const u32 any = ballot(found);
        if (lane == 0) st_shared(&shared.not_finite[key], any);
    }
}

// Adds the replaced infinities and NaN
// to the queries that attend to them.
template <class IsKeyVisible>
QG_DEVICE void add_not_finite(Rows& rows, const KernelParams& p, const Sequence& s, const SharedStorage& shared, u32 tile,
                              const u8* v_base, const IsKeyVisible& is_key_visible) {
    const u32 lane = thread_index() % 32;
    for (u32 j = 0; j < QG_KEYS; j++) {
        const u32 key = tile + j;
        if (ld_shared(&shared.not_finite[j]) == 0) continue;
        const KeyAddress at = address_of_key(p, s, key);
        const u8* from = v_base + (at.page * p.at.v_page + at.row * p.at.v_token) * 2;
        bool is_visible[LANE_ROWS];
#pragma unroll
        for (u32 i = 0; i < LANE_ROWS; i++) is_visible[i] = is_key_visible(i, key);
#pragma unroll
        for (u32 n = 0; n < ROW_TILES * FEATURE_TILES; n++) {
#pragma unroll
            for (u32 i = 0; i < TILE_SUMS; i++) {
                const u32 column = Fragments::feature_of(n, i, lane), row = Fragments::row_of<FEATURE_TILES>(n, i);
                if (!is_visible[row] || column >= p.shape.v_dim) continue;
                const u32 half = ld_global_u16(from + column * 2);
                if (!is_finite(half)) rows.sums[n][i] += QG_KV == DTYPE_BF16 ? bf16_to_f32(half) : f16_to_f32(half);
            }
        }
    }
}
