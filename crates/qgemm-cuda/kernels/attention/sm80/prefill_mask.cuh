// Prefill with cp.async: keys that queries do not attend to.
#pragma once
#include "attention/sm80/prefill_copy.cuh"

// Visible keys of the lane's two queries in a row
// tile. Rows beyond the last repeat the last query.
QG_DEVICE void visible_to_lane(KeyRange (&visible)[2], const AttentionParams& p, const Work& work, u32 row_tile) {
    const u32 row = thread_index() / 32 * WARP_ROWS + row_tile * 16 + thread_index() % 32 / 4;
#pragma unroll
    for (u32 i = 0; i < 2; i++)
        visible[i] = visible_keys(p, work.s, least(work.first_query + row + 8 * i, work.last_query));
}

// Next tile; with a mask, the next tile that has visible keys.
QG_DEVICE u32 tile_behind(const KernelParams& p, const Work& work, SharedStorage& shared, u32 tile) {
#if QG_BITS
    return TileBits<ROWS>::next(shared.tiles, p, masked_rows(work), tile + QG_KEYS, false);
#else
    return tile + QG_KEYS;
#endif
}

#if QG_BITS
// Masks scores by the mask bits,
// which include the causal range.
QG_DEVICE void mask_scores_by_bits(float (&scores)[SCORES], const SharedStorage& shared, u32 row_tile) {
    const u32 row = thread_index() / 32 * WARP_ROWS + row_tile * 16 + thread_index() % 32 / 4;
#pragma unroll
    for (u32 i = 0; i < 2; i++) {
#pragma unroll
        for (u32 word = 0; word < QG_KEYS / WORD_KEYS; word++) {
            const u32 bits = ld_shared(&shared.tiles.of_row[row + 8 * i][word]) >> thread_index() % 4 * 2;
#pragma unroll
            for (u32 j = 0; j < WORD_KEYS / MMA_N * 2; j++) {
                float& score = scores[(word * (WORD_KEYS / MMA_N) + j / 2) * 4 + i * 2 + j % 2];
                if (!(bits >> (j / 2 * MMA_N + j % 2) & 1u)) score = minus_infinity();
            }
        }
    }
}
#endif

// Masks keys without a page.
QG_DEVICE void mask_pages(float (&scores)[SCORES], const SharedStorage& shared) {
    u32 present[2] = {~0u, ~0u};
#pragma unroll
    for (u32 i = 0; i < QG_KEYS / 32; i++) present[i] = ld_shared(&shared.present[i]);
#pragma unroll
    for (u32 i = 0; i < SCORES; i++) {
        const u32 column = i / 4 * 8 + thread_index() % 4 * 2 + i % 2;
        if (!(present[i / 16] >> column % 32 & 1u)) scores[i] = minus_infinity();
    }
}

// Whether some query does not attend to all keys of a
// tile. With a block table any key may lack a page.
QG_DEVICE bool is_mixed(const KernelParams& p, const Work& work, const SharedStorage& shared, u32 tile) {
#if QG_BITS
    return !TileBits<ROWS>::is_full(shared.tiles, tile) || p.shape.table_width != 0;
#else
    return tile < work.visible_to_all.first || tile + QG_KEYS > work.visible_to_all.end || p.shape.table_width != 0;
#endif
}
