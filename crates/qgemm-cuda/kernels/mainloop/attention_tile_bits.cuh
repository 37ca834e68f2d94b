// Which tiles of QG_KEYS keys a CTA has to look at, by a mask of bits, and what its queries see of one.
#pragma once
#include "atoms/bits.cuh"
#include "mainloop/attention_bits.cuh"

#ifdef QG_BITS

// The queries of a CTA, and the end of what they see together.
struct MaskedRows {
    Sequence s;
    u32 head, first_query, last_query, keys_end;
};

// Of a CTA with ROWS rows of queries; those that are not there do as the last one.
template <u32 ROWS>
struct TileBits {
    static constexpr u32 WARPS = QG_THREADS / 32, WORDS = QG_KEYS / WORD_KEYS;
    // What each warp found of 32 tiles, a bit each, for the rows of its threads: whether a query sees a key of it, and whether all queries see
    // all of its keys.
    u32 some[WARPS], every[WARPS];
    // The keys of one tile that each row sees.
    u32 of_row[ROWS][WORDS];

    // Whether all queries see all keys of a tile of those that were looked at last.
    QG_DEVICE bool is_full(const TileBits& found, u32 tile) {
        u32 every = ~0u;
#pragma unroll
        for (u32 w = 0; w < WARPS; w++) every &= ld_shared(&found.every[w]);
        return every >> (tile / QG_KEYS % 32) & 1u;
    }

    // Notes what rows see of a tile, whose keys are copied meanwhile.
    QG_DEVICE void note(TileBits& found, const KernelParams& p, const MaskedRows& rows, u32 tile) {
        if (thread_index() >= ROWS) return;
        const u32 query = least(rows.first_query + thread_index(), rows.last_query);
        const KeyRange seen = keys_seen(p, rows.s, query);
        const u8* row = mask_row(p, rows.s, rows.head, query);
#pragma unroll
        for (u32 word = 0; word < WORDS; word++)
            st_shared(&found.of_row[thread_index()][word], mask_bits(p, row, seen, tile + word * WORD_KEYS));
    }

    // The first tile from `tile` on of which a query sees a key, or one behind the last. Tiles are asked for in their order; the first of all
    // is `is_first`. All threads take part.
    QG_DEVICE u32 next(TileBits& found, const KernelParams& p, const MaskedRows& rows, u32 tile, bool is_first) {
#pragma unroll 1
        while (tile < rows.keys_end) {
            const u32 place = tile / QG_KEYS % 32;
            if (is_first || place == 0) look(found, p, rows, tile / (32 * QG_KEYS) * (32 * QG_KEYS));
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

    // Looks at the 32 tiles from key `first` on.
    QG_DEVICE void look(TileBits& found, const KernelParams& p, const MaskedRows& rows, u32 first) {
        const u32 query = least(rows.first_query + thread_index() % ROWS, rows.last_query);
        const KeyRange seen = keys_seen(p, rows.s, query);
        const u8* row = mask_row(p, rows.s, rows.head, query);
        u32 some = 0, every = 0;
#pragma unroll 1
        for (u32 i = 0; i < 32 && first + i * QG_KEYS < rows.keys_end; i++) {
            Sight sight = Sight::none();
            Sight::add<WORDS>(sight, p, row, seen, first + i * QG_KEYS);
            if (ballot(sight.any != 0) != 0) some |= 1u << i;
            if (ballot(sight.all != ~0u) == 0) every |= 1u << i;
        }
        // Nobody reads what was found before.
        cta_barrier();
        if (thread_index() % 32 == 0) {
            st_shared(&found.some[thread_index() / 32], some);
            st_shared(&found.every[thread_index() / 32], every);
        }
        cta_barrier();
    }
};

#endif
