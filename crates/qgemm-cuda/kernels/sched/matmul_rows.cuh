// The tile of a CTA where products share the rows of one A, C and D: offsets in device memory say which rows are whose.
#pragma once
#include "atoms/bits.cuh"
#include "atoms/warp.cuh"
#include "sched/lane_sums.cuh"
#include "sched/matmul_tile.cuh"

// Rows of one product, QG_TILE_M at most.
struct MatmulRows {
    u32 product, first, end;

    // The offset that product `i` begins with; none leads out of D.
    QG_DEVICE u32 offset(const MatmulParams& p, u32 i) {
        const u32 at = ld_global_u32(reinterpret_cast<const u8*>(p.at.offsets) + (u64)i * 4);
        return at < p.shape.m ? at : p.shape.m;
    }

    QG_DEVICE u32 tiles_of(u32 rows) {
        return (rows + QG_TILE_M - 1) / QG_TILE_M;
    }

    // Those of tile `place` of all tiles of rows; none beyond the last. A lane of each warp looks at one of 32 products at a time. No
    // offset leads before one that precedes it, so that no two products have a row in common.
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
                // As many lanes end before this place.
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

// Columns follow one another, so that CTAs at work at once share A. The problem ends with the rows of the tile's product, whose A and D
// are the first. Offsets are what work before may have written.
#define QG_TAKE_MATMUL_TILE(p, tile, given)                                                              \
    griddepcontrol_wait();                                                                               \
    const u32 cta_of_all = cta_index().x;                                                                \
    const MatmulRows rows = MatmulRows::find(given, cta_of_all / given.tiles.n_tiles);                   \
    if (rows.first >= rows.end) return;                                                                  \
    MatmulParams p = given;                                                                              \
    p.shape.m = rows.end;                                                                                \
    const MatmulTile tile = {rows.product, rows.first, cta_of_all % given.tiles.n_tiles * QG_TILE_N, 0,  \
                             given.tiles.k_tiles, 0, given.shape.k, cta_of_all, 0}
