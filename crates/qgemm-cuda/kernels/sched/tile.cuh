// Tile scheduler: work tiles of a CTA (`Partition`
// in qgemm-sched).
#pragma once
#include "atoms/launch.cuh"
#include "sched/experts.cuh"
#include "sched/projection.cuh"

// An output tile, or a K range of one.
struct WorkTile {
    u32 n_tile, m_tile;
    // K-tiles [begin, end) of the output tile.
    u32 begin, end;
    // CTAs that share the tile, this CTA's rank in K order, and
    // the tile's counter.
    u32 peers, index, tile;
    // Partial-sum slot of peer 0; the other peers' slots follow.
    u32 first_slot;
#if QG_EXPERT_TILES
    // The expert's rows, and padding to 16-byte chunks.
    OwnRows own;
    u32 unused;
#endif

    // For a grid (n tile, m tile, split).
    QG_DEVICE WorkTile of_grid(const GemmParams& p) {
        const u32x3 cta = cta_index();
        WorkTile w;
        w.n_tile = cta.x;
        // With experts the problem starts at the CTA's rows.
        w.m_tile = QG_EXPERTS ? 0 : cta.y;
        w.begin = 0, w.end = p.shape.k_tiles;
        // Skip the divisions if unsplit: weight addresses wait for them.
        if (p.shape.splits > 1) {
            w.begin = first_k_tile(p, cta.z);
            w.end = first_k_tile(p, cta.z + 1);
        }
        w.peers = p.shape.splits;
        w.index = cta.z;
        w.tile = cta.y * grid_ctas().x + cta.x;
        w.first_slot = w.tile * p.shape.splits;
        return w;
    }

    // split * k_tiles / splits without 64-bit arithmetic.
    QG_DEVICE u32 first_k_tile(const GemmParams& p, u32 split) {
        const u32 whole = p.shape.k_tiles / p.shape.splits, rest = p.shape.k_tiles % p.shape.splits;
        return split * whole + split * rest / p.shape.splits;
    }

    // Swizzled tile order. A swizzle group has `swizzle_group`
    // n-tiles and all m-tiles; n runs fastest in the group.
    QG_DEVICE void place(WorkTile& w, const TileSchedule& s, u32 tile) {
        const u32 group = tile / (s.swizzle_group * s.m_tiles);
        const u32 first = group * s.swizzle_group;
        const u32 width = s.n_tiles - first < s.swizzle_group ? s.n_tiles - first : s.swizzle_group;
        const u32 rest = tile - first * s.m_tiles;
        w.tile = tile;
        w.n_tile = first + rest % width;
        w.m_tile = rest / width;
    }
};

#if QG_EXPERT_TILES
// Work of a CTA in a persistent MoE grid: tiles with a stride
// of the grid size. Tiles are numbered along N, then by rows.
struct WorkList {
    u32 tile, unused;
    PassedExperts passed;

    QG_DEVICE WorkList of_cta(const GemmParams&) { return {cta_index().x / QG_CLUSTER, 0, {}}; }

    // Next work tile, for all lanes of a warp; false at the end.
    // Values are shuffled from lane 0, so that the compiler knows
    // they are uniform.
    QG_DEVICE bool next(WorkList& list, const GemmParams& p, WorkTile& w) {
        const u32 n_tiles = p.tiles.n_tiles;
        const OwnRows own = OwnRows::find(p.groups, list.tile / n_tiles, list.passed);
        w.own = {shfl_idx_u32(own.expert, 0), shfl_idx_u32(own.first, 0), shfl_idx_u32(own.rows, 0)};
        if (w.own.rows == 0) return false;
        if constexpr (QG_CLUSTER > 1) w.own = OwnRows::of_rank(w.own);
        w.n_tile = list.tile % n_tiles;
        w.m_tile = w.begin = w.index = w.tile = w.first_slot = w.unused = 0;
        w.end = p.shape.k_tiles;
        w.peers = 1;
        list.tile += grid_ctas().x / QG_CLUSTER;
        return true;
    }
};

// Problem of a work tile.
QG_DEVICE GemmParams problem_of(const GemmParams& p, const WorkTile& work) {
    GemmParams own = p;
    OwnRows::narrow(work.own, own);
    return own;
}
#else
#if QG_SEGMENT_TILES
// Problem of a work tile: its segment.
QG_DEVICE GemmParams problem_of(const GemmParams& p, const WorkTile& work) {
    GemmParams own = p;
    Segment::narrow(own, work.n_tile * QG_TILE_FEATURES);
    return own;
}
#else
QG_DEVICE const GemmParams& problem_of(const GemmParams& p, const WorkTile&) {
    return p;
}
#endif

// Work of a CTA or cluster in a persistent grid:
// its range of the split tiles, then whole tiles.
struct WorkList {
    // Rest of the range, in quanta of `cut_k_tiles` k-tiles.
    // A split tile has `quanta` quanta.
    u32 quantum, last_quantum, quanta;
    // Next whole tile, in swizzled order.
    u32 tile;

    QG_DEVICE WorkList of_cta(const GemmParams& p) {
        const TileSchedule& s = p.tiles;
        const u32 cta = cta_index().x / QG_CLUSTER;
        WorkList list;
        list.quantum = list.last_quantum = list.quanta = 0;
        if (cta < s.cut_ctas) {
            list.quanta = (p.shape.k_tiles + s.cut_k_tiles - 1) / s.cut_k_tiles;
            const u64 total = (u64)s.cut_tiles * list.quanta;
            list.quantum = (u32)(cta * total / s.cut_ctas);
            list.last_quantum = (u32)((cta + 1) * total / s.cut_ctas);
        }
        list.tile = s.cut_tiles + cta;
        return list;
    }

    // Next work tile; false at the end.
    QG_DEVICE bool next(WorkList& list, const GemmParams& p, WorkTile& w) {
        if (list.quantum < list.last_quantum) {
            next_of_range(list, p, w);
            return true;
        }
        const TileSchedule& s = p.tiles;
        if (list.tile >= s.n_tiles * s.m_tiles) return false;
        WorkTile::place(w, s, list.tile);
        w.begin = 0;
        w.end = p.shape.k_tiles;
        w.peers = 1;
        w.index = w.first_slot = 0;
        list.tile += grid_ctas().x / QG_CLUSTER;
        return true;
    }

    // The range's part in its next tile.
    QG_DEVICE void next_of_range(WorkList& list, const GemmParams& p, WorkTile& w) {
        const TileSchedule& s = p.tiles;
        const u32 tile = list.quantum / list.quanta;
        const u32 tile_begin = tile * list.quanta, tile_end = tile_begin + list.quanta;
        const u32 end = list.last_quantum < tile_end ? list.last_quantum : tile_end;
        WorkTile::place(w, s, tile);
        w.begin = (list.quantum - tile_begin) * s.cut_k_tiles;
        w.end = end == tile_end ? p.shape.k_tiles : (end - tile_begin) * s.cut_k_tiles;
        const u32 first_cta = owner(s, list.quanta, tile_begin);
        w.peers = owner(s, list.quanta, tile_end - 1) - first_cta + 1;
        w.index = cta_index().x / QG_CLUSTER - first_cta;
        // Upper bound of the split tiles before this one.
        w.first_slot = first_cta + (tile < first_cta ? tile : first_cta);
        list.quantum = end;
    }

    // CTA whose range contains `quantum`.
    QG_DEVICE u32 owner(const TileSchedule& s, u32 quanta, u32 quantum) {
        return (u32)(((u64)(quantum + 1) * s.cut_ctas - 1) / ((u64)s.cut_tiles * quanta));
    }
};
#endif
