// Persistent MoE GEMM for few rows per expert.
// Each CTA gets an equal, contiguous range of W row tiles,
// counted over all tiles of rows.
// Consecutive experts in memory thus give a CTA
// contiguous weights.
#pragma once
#include "atoms/fresh_load.cuh"
#include "sched/experts.cuh"
#include "sched/lane_sums.cuh"

// Expert index in shared memory: counts, or
// offsets plus the end.
// Every warp of every CTA reads these words, and only a few L2
// lines hold them.
struct ExpertWords {
    // Limit of the kernel; the host checks it.
    static constexpr u32 MOST_EXPERTS = 1024;
    u32 word[MOST_EXPERTS + 1];

    // All threads of the CTA load. Bypasses L1, whose
    // lines may be stale.
    QG_DEVICE void load(ExpertWords& words, const ExpertGroups& g, u32 thread) {
        const u64 from = g.list != 0 ? g.offsets : g.index;
        const u32 count = g.experts + (g.form == QG_FORM_MASKED ? 0 : 1);
        for (u32 i = thread; i < count; i += QG_THREADS)
            st_shared(&words.word[i], ld_global_fresh_u32(reinterpret_cast<const u8*>(from) + (u64)i * 4));
        cta_barrier();
    }

    // Row count and first row of an expert; 0 past the last expert.
    QG_DEVICE u32 rows_of(const ExpertWords& words, const ExpertGroups& g, u32 expert, u32& first) {
        first = 0;
        if (expert >= g.experts) return 0;
        const u32 own = ld_shared(&words.word[expert]), most = own < g.rows ? own : g.rows;
        if (g.form == QG_FORM_MASKED) {
            // `rows` is the capacity of an expert.
            first = expert * g.rows;
            return most;
        }
        const u32 after = ld_shared(&words.word[expert + 1]), end = after < g.rows ? after : g.rows;
        first = most;
        return end > most ? end - most : 0;
    }
};

// Rows of row tile `place`, uniform over the warp.
// Past the last tile `rows` is 0 and `first` is the tile count.
// A real call, to keep one copy of the code in the kernel.
QG_DEVICE_CALL OwnRows find_tile(const ExpertWords& words, const ExpertGroups& g, u32 place) {
    const u32 lane = thread_index() % 32;
    u32 passed = 0;
#pragma unroll 1
    for (u32 expert = lane; expert - lane < g.experts; expert += 32) {
        u32 first;
        const u32 count = ExpertWords::rows_of(words, g, expert, first), tiles = OwnRows::tiles_of(count);
        const u32 until = sum_up_to_lane(tiles);
        const u32 all = shfl_idx_u32(until, 31);
        if (place - passed < all) {
            // The number of lanes that end before `place`.
            const u32 owner = popc(ballot(passed + until <= place));
            const u32 skipped = (place - passed - (until - tiles)) * TILE_ROWS, left = count - skipped;
            return {shfl_idx_u32(expert, owner), shfl_idx_u32(first + skipped, owner),
                    shfl_idx_u32(left < TILE_ROWS ? left : TILE_ROWS, owner)};
        }
        passed += all;
    }
    return {0, passed, 0};
}

// Row-tile search. Lanes keep up to WARP_EXPERTS
// experts in registers.
// With more experts each search starts over.
struct RowTileIndex {
    u32 first[LANE_EXPERTS], count[LANE_EXPERTS];
    // Tiles up to and including this lane, and all tiles.
    u32 until, all;

    QG_DEVICE RowTileIndex of(const ExpertWords& words, const ExpertGroups& g) {
        RowTileIndex index = {};
        if (!has_all(g)) {
            index.all = find_tile(words, g, ~0u).first;
            return index;
        }
        const u32 lane = thread_index() % 32;
#pragma unroll
        for (u32 i = 0; i < LANE_EXPERTS; i++) {
            index.count[i] = ExpertWords::rows_of(words, g, lane * LANE_EXPERTS + i, index.first[i]);
            index.until += OwnRows::tiles_of(index.count[i]);
        }
        index.until = sum_up_to_lane(index.until);
        index.all = shfl_idx_u32(index.until, 31);
        return index;
    }

    QG_DEVICE bool has_all(const ExpertGroups& g) {
        return g.experts <= WARP_EXPERTS;
    }

    // As `find_tile`, but without the tile count in `first`.
    QG_DEVICE OwnRows find(const RowTileIndex& index, const ExpertWords& words, const ExpertGroups& g, u32 place) {
        if (!has_all(g)) return find_tile(words, g, place);
        if (place >= index.all) return {0, 0, 0};
        // The number of lanes that end before `place`.
        const u32 owner = popc(ballot(index.until <= place));
        u32 end = index.until;
        OwnRows own = {};
#pragma unroll
        for (u32 i = LANE_EXPERTS; i-- > 0;) {
            const u32 begin = end - OwnRows::tiles_of(index.count[i]);
            if (place >= begin && place < end) {
                const u32 skipped = (place - begin) * TILE_ROWS, left = index.count[i] - skipped;
                own = {thread_index() % 32 * LANE_EXPERTS + i, index.first[i] + skipped, left < TILE_ROWS ? left : TILE_ROWS};
            }
            end = begin;
        }
        return {shfl_idx_u32(own.expert, owner), shfl_idx_u32(own.first, owner), shfl_idx_u32(own.rows, owner)};
    }
};

struct RowTileRange {
    // First tile of rows, and the CTA's range of row tiles.
    // The range is counted from row tile 0 of this tile of rows.
    u32 first_place, first, end;
    // Row tiles of W per tile of rows.
    u32 row_tiles;

    // The CTA's range among `places` tiles of rows.
    QG_DEVICE RowTileRange of_cta(const GemmParams& p, u32 places) {
        RowTileRange range;
        range.row_tiles = (p.shape.stored_rows + QG_TILE_ROWS - 1) / QG_TILE_ROWS;
        // The host ensures that 32 bits suffice.
        const u32 all = places * range.row_tiles, cta = cta_index().x, ctas = grid_ctas().x;
        const u32 each = all / ctas, more = all % ctas;
        const u32 first = cta * each + (cta < more ? cta : more);
        range.first_place = first / range.row_tiles;
        range.first = first % range.row_tiles;
        range.end = range.first + each + (cta < more ? 1 : 0);
        return range;
    }

    // Tiles of rows that the range touches.
    QG_DEVICE u32 tiles(const RowTileRange& range) {
        return (range.end + range.row_tiles - 1) / range.row_tiles;
    }

    // End of the row tiles in tile of rows `tile` of the range.
    QG_DEVICE u32 end_of(const RowTileRange& range, u32 tile) {
        const u32 end = (tile + 1) * range.row_tiles;
        return end < range.end ? end : range.end;
    }
};
