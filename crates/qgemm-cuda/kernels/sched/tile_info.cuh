// Tile info of an expert's rows, from the producer
// to the consumers.
// The producer warp searches the index and the list once
// per tile; consumer warps would lose thousands of
// cycles on the search.
#pragma once
#include "sched/rows.cuh"
#include "sched/tile.cuh"

#if QG_EXPERT_TILES
struct alignas(16) TileInfo {
    static constexpr u32 NO_ROW = ~0u, PARTS = (QG_TILE_M + 31) / 32;
    // `rows` = 0 ends the work.
    u32 expert, first, rows, n_tile;
    // The row of each token, if rows are listed.
    u32 row[QG_TILE_M];

    // All lanes of a warp write; a warp barrier follows.
    QG_DEVICE void write(TileInfo& info, const GemmParams& own, const WorkTile& work, u32 lane) {
        if (lane == 0)
            st_shared(reinterpret_cast<u32x4*>(&info), u32x4{work.own.expert, work.own.first, work.own.rows, work.n_tile});
        if (own.groups.list != 0) {
            u32 row[PARTS];
#pragma unroll
            for (u32 i = 0; i < PARTS; i++)
                if (!find_row(own, i * 32 + lane, row[i])) row[i] = NO_ROW;
#pragma unroll
            for (u32 i = 0; i < PARTS; i++)
                if (QG_TILE_M % 32 == 0 || i * 32 + lane < QG_TILE_M) st_shared(&info.row[i * 32 + lane], row[i]);
        }
        warp_barrier();
    }
    QG_DEVICE void write_end(TileInfo& info, u32 lane) {
        if (lane == 0) st_shared(reinterpret_cast<u32x4*>(&info), u32x4{0, 0, 0, 0});
        warp_barrier();
    }

    // All lanes of a warp read; false at the end of the work.
    // Values are shuffled from lane 0, so that the compiler knows
    // they are uniform.
    QG_DEVICE bool read(const TileInfo& info, const GemmParams& p, WorkTile& w) {
        const u32x4 v = ld_shared(reinterpret_cast<const u32x4*>(&info));
        w = {};
        w.own = {shfl_idx_u32(v.x, 0), shfl_idx_u32(v.y, 0), shfl_idx_u32(v.z, 0)};
        w.n_tile = shfl_idx_u32(v.w, 0);
        w.end = p.shape.k_tiles;
        w.peers = 1;
        return w.own.rows != 0;
    }

    // Row of D of a token, as `find_row`.
    QG_DEVICE bool find(const TileInfo& info, const GemmParams& p, u32 token, u32& row) {
        row = token;
        if (token >= p.shape.m) return false;
        if (p.groups.list == 0) return true;
        row = ld_shared(&info.row[token]);
        return row != NO_ROW;
    }
};
#endif
