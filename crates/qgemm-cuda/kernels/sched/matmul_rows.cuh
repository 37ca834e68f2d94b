// Tile scheduler of a row-grouped matmul.
// The products share the rows of one A, C and D.
// Device offsets give each product's rows.
#pragma once
#include "atoms/bits.cuh"
#include "atoms/warp.cuh"
#include "sched/lane_sums.cuh"
#include "sched/matmul_tile.cuh"

// Rows of one product, from `first` to `end`.
struct MatmulRows {
    u32 product, first, end;

    // First row of product `i`, clamped to M.
    QG_DEVICE u32 offset(const MatmulParams& p, u32 i) {
        const u32 at = ld_global_u32(reinterpret_cast<const u8*>(p.at.offsets) + (u64)i * 4);
        return at < p.shape.m ? at : p.shape.m;
    }

    QG_DEVICE u32 tiles_of(u32 rows) {
        return (rows + QG_TILE_M - 1) / QG_TILE_M;
    }

    // Rows of row tile `place`; empty past the last tile.
    // Each lane scans one of 32 products at a time.
    // Offsets are made monotonic: no row belongs to two products.
    QG_DEVICE MatmulRows find(const MatmulParams& p, u32 place) {
        const u32 lane = thread_index() % 32, products = p.tiles.m_tiles;
        u32 reached = offset(p, 0), passed = 0;
        for (u32 begin = 0; begin < products; begin += 32) {
            const u32 product = begin + lane;
            u32 end = product < products ? offset(p, product + 1) : 0;
            end = end > reached ? end : reached;
#pragma unroll
            for (u32 step = 1; step < 32; step *= 2) {
                const u32 other = shfl_idx_u32(end, lane >= step ? lane - step : lane);
                end = other > end ? other : end;
            }
            const u32 before = shfl_idx_u32(end, lane == 0 ? 0 : lane - 1);
            const u32 first = lane == 0 ? reached : before;
            const u32 tiles = tiles_of(end - first);
            const u32 until = sum_up_to_lane(tiles);
            const u32 all = shfl_idx_u32(until, 31);
            if (place < passed + all) {
                // The number of lanes that end before `place`.
                const u32 owner = popc(ballot(passed + until <= place));
                const u32 skipped = place - passed - shfl_idx_u32(until - tiles, owner);
                return {begin + owner, shfl_idx_u32(first, owner) + skipped * QG_TILE_M, shfl_idx_u32(end, owner)};
            }
            passed += all;
            reached = shfl_idx_u32(end, 31);
        }
        return {0, 0, 0};
    }
};

// Tiles run along N first, so concurrent CTAs share A.
// M of the problem is the end of the product's rows.
// A and D still start at row 0.
// Earlier work may write the offsets, hence the wait.
#define QG_TAKE_MATMUL_TILE(p, tile, given)                                                              \
    griddepcontrol_wait();                                                                               \
    const u32 cta_of_all = cta_index().x;                                                                \
    const MatmulRows rows = MatmulRows::find(given, cta_of_all / given.tiles.n_tiles);                   \
    if (rows.first >= rows.end) return;                                                                  \
    MatmulParams p = given;                                                                              \
    p.shape.m = rows.end;                                                                                \
    const MatmulTile tile = {rows.product, rows.first, cta_of_all % given.tiles.n_tiles * QG_TILE_N, 0,  \
                             given.tiles.k_tiles, 0, given.shape.k, cta_of_all, 0}
