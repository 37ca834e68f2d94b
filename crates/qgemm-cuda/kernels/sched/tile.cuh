// Which tile and which K range a block works on: grid (n tile, m tile, split), as qgemm-sched lays it out.
#pragma once
#include "atoms/launch.cuh"
#include "mainloop/params.cuh"

struct TileWork {
    u32 n_tile, m_tile, split;
    // Slabs [begin, end) of the tile's K dimension.
    u32 begin, end;

    QG_DEVICE TileWork of_block(const GemmParams& p) {
        TileWork w;
        const u32x3 block = block_index();
        w.n_tile = block.x;
        w.m_tile = block.y;
        w.split = block.z;
        w.begin = (u32)((u64)w.split * p.shape.k_slabs / p.shape.splits);
        w.end = (u32)((u64)(w.split + 1) * p.shape.k_slabs / p.shape.splits);
        return w;
    }

    // Index of the output tile, for its partial sums and its counter.
    QG_DEVICE u64 index(const TileWork& w) {
        return (u64)w.m_tile * grid_blocks().x + w.n_tile;
    }
};
