// The work of a CTA of a persistent grid with experts of a few rows each: neighbouring row tiles of W, as many as every other CTA has, of
// all tiles of rows one after the other. Where an expert follows another in memory, so do the weights that a CTA reads.
#pragma once
#include "atoms/fresh_load.cuh"
#include "sched/experts.cuh"
#include "sched/lane_sums.cuh"

// The words of an index that say which rows are an expert's, in shared memory: counts, or else offsets and one behind the last. All warps
// of all CTAs look at them, and few lines of L2 hold them.
struct ExpertWords {
    // The host offers the kernel to no more experts.
    static constexpr u32 MOST_EXPERTS = 1024;
    u32 word[MOST_EXPERTS + 1];

    // For all threads of a CTA; past L1, which may keep what was there before.
    QG_DEVICE void load(ExpertWords& words, const ExpertGroups& g, u32 thread) {
        const u64 from = g.list != 0 ? g.offsets : g.index;
        const u32 count = g.experts + (g.form == QG_FORM_MASKED ? 0 : 1);
        for (u32 i = thread; i < count; i += QG_THREADS)
            st_shared(&words.word[i], ld_global_fresh_u32(reinterpret_cast<const u8*>(from) + (u64)i * 4));
        cta_barrier();
    }

    // How many rows an expert has, and the first; none beyond the last expert.
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

// The rows of tile `place` of all tiles of rows, for all lanes of a warp. Where it is none, there are no rows, and `first` is how many tiles
// there are. The code stands in the kernel once.
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
            // As many lanes end before this place.
            const u32 owner = popc(ballot(passed + until <= place));
            const u32 skipped = (place - passed - (until - tiles)) * TILE_ROWS, left = count - skipped;
            return {shfl_idx_u32(expert, owner), shfl_idx_u32(first + skipped, owner),
                    shfl_idx_u32(left < TILE_ROWS ? left : TILE_ROWS, owner)};
        }
        passed += all;
    }
    return {0, passed, 0};
}

// Where tiles of rows are found. Each lane of a warp has a few of WARP_EXPERTS experts in registers; of more, each search begins anew.
struct RowTileIndex {
    u32 first[LANE_EXPERTS], count[LANE_EXPERTS];
    // The tiles of the lanes up to this one, and of all.
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

    // As `find_tile`, but for what `first` is where there are no rows.
    QG_DEVICE OwnRows find(const RowTileIndex& index, const ExpertWords& words, const ExpertGroups& g, u32 place) {
        if (!has_all(g)) return find_tile(words, g, place);
        if (place >= index.all) return {0, 0, 0};
        // As many lanes end before this place.
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
    // The first tile of rows, and of its row tiles the first that is this CTA's; behind the last, counted like that.
    u32 first_place, first, end;
    // Row tiles of a tile of rows.
    u32 row_tiles;

    // Of `places` tiles of rows.
    QG_DEVICE RowTileRange of_cta(const GemmParams& p, u32 places) {
        RowTileRange range;
        range.row_tiles = (p.shape.stored_rows + QG_TILE_ROWS - 1) / QG_TILE_ROWS;
        // The host offers the kernel where 32 bits count them.
        const u32 all = places * range.row_tiles, cta = cta_index().x, ctas = grid_ctas().x;
        const u32 each = all / ctas, more = all % ctas;
        const u32 first = cta * each + (cta < more ? cta : more);
        range.first_place = first / range.row_tiles;
        range.first = first % range.row_tiles;
        range.end = range.first + each + (cta < more ? 1 : 0);
        return range;
    }

    // Tiles of rows that have some.
    QG_DEVICE u32 tiles(const RowTileRange& range) {
        return (range.end + range.row_tiles - 1) / range.row_tiles;
    }

    // What is behind the last row tile of the range's tile of rows number `tile`.
    QG_DEVICE u32 end_of(const RowTileRange& range, u32 tile) {
        const u32 end = (tile + 1) * range.row_tiles;
        return end < range.end ? end : range.end;
    }
};
