// Masked attention: skips K tiles that the mask hides, and
// holds the mask bits of the current tile in shared memory.
#pragma once
#include "atoms/bits.cuh"
#include "attention/mask.cuh"

#if QG_BITS

// Queries of a CTA, and the end of the
// keys that any of them attends to.
struct MaskedRows {
    Sequence s;
    u32 head, first_query, last_query, keys_end;
};

// Mask state of a CTA with ROWS query rows.
// Rows beyond the last repeat the last row.
template <u32 ROWS>
struct TileBits {
    static constexpr u32 WARPS = QG_THREADS / 32, WORDS = QG_KEYS / WORD_KEYS;
    // Per warp, one bit for each of 32 tiles: `some`
    // if a query attends to a key of the tile, `every`
    // if all queries attend to all of its keys.
    u32 some[WARPS], every[WARPS];
    // Mask bits of the current tile.
    u32 of_row[ROWS][WORDS];

    // Whether the tile, one of the last 32
    // classified, is fully visible to all queries.
    QG_DEVICE bool is_full(const TileBits& found, u32 tile) {
        u32 every = ~0u;
#pragma unroll
        for (u32 w = 0; w < WARPS; w++) every &= ld_shared(&found.every[w]);
        return every >> (tile / QG_KEYS % 32) & 1u;
    }

    // Stores the mask bits of a tile;
    // its keys are copied meanwhile.
    QG_DEVICE void store_row_bits(TileBits& found, const KernelParams& p, const MaskedRows& rows, u32 tile) {
        if (thread_index() >= ROWS) return;
        const u32 query = least(rows.first_query + thread_index(), rows.last_query);
        const KeyRange visible = visible_keys(p, rows.s, query);
        const u8* row = mask_row(p, rows.s, rows.head, query);
#pragma unroll
        for (u32 word = 0; word < WORDS; word++)
            st_shared(&found.of_row[thread_index()][word], mask_bits(p, row, visible, tile + word * WORD_KEYS));
    }

    // First tile at or after `tile` with a visible key, or
    // one past the last tile. Call in ascending order;
    // `is_first` on the first call. All threads take part.
    QG_DEVICE u32 next(TileBits& found, const KernelParams& p, const MaskedRows& rows, u32 tile, bool is_first) {
#pragma unroll 1
        while (tile < rows.keys_end) {
            const u32 place = tile / QG_KEYS % 32;
            if (is_first || place == 0) classify_tiles(found, p, rows, tile / (32 * QG_KEYS) * (32 * QG_KEYS));
            is_first = false;
            u32 some = 0;
#pragma unroll
            for (u32 w = 0; w < WARPS; w++) some |= ld_shared(&found.some[w]);
            some >>= place;
            if (some != 0) return tile + popc((some & (0u - some)) - 1) * QG_KEYS;
            tile += (32 - place) * QG_KEYS;
        }
        return tile;
    }

    // Classifies the 32 tiles from key `first` on.
    QG_DEVICE void classify_tiles(TileBits& found, const KernelParams& p, const MaskedRows& rows, u32 first) {
        const u32 query = least(rows.first_query + thread_index() % ROWS, rows.last_query);
        const KeyRange visible = visible_keys(p, rows.s, query);
        const u8* row = mask_row(p, rows.s, rows.head, query);
        u32 some = 0, every = 0;
#pragma unroll 1
        for (u32 i = 0; i < 32 && first + i * QG_KEYS < rows.keys_end; i++) {
            TileVisibility visibility = TileVisibility::none();
            TileVisibility::add<WORDS>(visibility, p, row, visible, first + i * QG_KEYS);
            if (ballot(visibility.any != 0) != 0) some |= 1u << i;
            if (ballot(visibility.all != ~0u) == 0) every |= 1u << i;
        }
        // All threads have read the old bits.
        cta_barrier();
        if (thread_index() % 32 == 0) {
            st_shared(&found.some[thread_index() / 32], some);
            st_shared(&found.every[thread_index() / 32], every);
        }
        cta_barrier();
    }
};

#endif
