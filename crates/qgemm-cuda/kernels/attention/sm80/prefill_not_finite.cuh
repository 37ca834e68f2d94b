// Prefill with cp.async: infinities and NaN
// in values of mixed tiles.
#pragma once
#include "attention/sm80/prefill_mask.cuh"

QG_DEVICE bool is_finite(u32 half) {
    constexpr u32 EXPONENT = QG_KV == DTYPE_BF16 ? 0x7f80u : 0x7c00u;
    return (half & EXPONENT) != EXPONENT;
}

// Replaces infinities and NaN in V of a mixed
// tile by zeros and sets a flag. A masked value
// must not reach a query through 0 · inf = NaN.
QG_DEVICE void zero_not_finite(SharedStorage& shared) {
    constexpr u32 CHUNKS = QG_KEYS * QG_V / 8;
    bool found = false;
    for (u32 chunk = thread_index(); chunk < CHUNKS; chunk += QG_THREADS) {
        u32x4* at = reinterpret_cast<u32x4*>(shared.v + chunk * 16);
        const u32x4 v = ld_shared(at);
        u32 words[4] = {v.x, v.y, v.z, v.w};
        bool is_changed = false;
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            if (!is_finite(words[i])) words[i] &= 0xffff0000u, is_changed = true;
            if (!is_finite(words[i] >> 16)) words[i] &= 0xffffu, is_changed = true;
        }
        if (is_changed) st_shared(at, {words[0], words[1], words[2], words[3]});
        found = found || is_changed;
    }
    if (ballot(found) != 0 && thread_index() % 32 == 0) st_shared(&shared.not_finite, 1u);
}

// Adds the replaced infinities and NaN to
// the queries that attend to them. They
// decide the sum in any order of addition.
QG_DEVICE void add_not_finite(Rows& rows, const KernelParams& p, const Work& work, const SharedStorage& shared) {
#pragma unroll 1
    for (u32 key = work.keys.first; key < work.keys.end; key++) {
#if !QG_BITS
        // With a mask, any tile may have been mixed.
        // Adding a value that was not replaced is
        // harmless: the sum is already infinite or NaN.
        if (!is_mixed(p, work, shared, key / QG_KEYS * QG_KEYS)) continue;
#endif
        const KeyAddress at = address_of_key(p, work.s, key);
        if (!at.is_present) continue;
        const u8* from = work.v + (at.page * p.at.v_page + at.row * p.at.v_token) * 2;
#pragma unroll
        for (u32 row = 0; row < ROW_TILES; row++) {
            KeyRange visible[2];
            visible_to_lane(visible, p, work, row);
#if QG_BITS
            // Hidden by the mask.
#pragma unroll
            for (u32 i = 0; i < 2; i++) {
                const u32 own = thread_index() / 32 * WARP_ROWS + row * 16 + thread_index() % 32 / 4 + 8 * i;
                const u32 query = least(work.first_query + own, work.last_query);
                const u8* of_query = mask_row(p, work.s, work.head, query);
                const u32 bits = mask_bits(p, of_query, visible[i], key / WORD_KEYS * WORD_KEYS);
                if (!(bits >> key % WORD_KEYS & 1u)) visible[i] = {0, 0};
            }
#endif
#pragma unroll
            for (u32 i = 0; i < SUMS; i++) {
                const u32 column = i / 4 * 8 + thread_index() % 4 * 2 + i % 2;
                const KeyRange& of_row = visible[i / 2 % 2];
                if (key < of_row.first || key >= of_row.end || column >= p.shape.v_dim) continue;
                const u32 half = ld_global_u16(from + column * 2);
                if (!is_finite(half)) rows.sums[row][i] += QG_KV == DTYPE_BF16 ? bf16_to_f32(half) : f16_to_f32(half);
            }
        }
    }
}
