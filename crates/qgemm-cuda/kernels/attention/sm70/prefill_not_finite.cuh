// Prefill: infinities and NaN in values of mixed tiles.
#pragma once
#include "attention/sm70/prefill_tile.cuh"

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
