// Tile info from the X producer to the consumers,
// in shared memory.
// Consumers do not search tiles themselves: it would cost
// time, and the compiler would lose track of warp uniformity.
// Ring positions would move to vector registers, and the main
// loop would get divergence handling.
#pragma once
#include "atoms/memory.cuh"
#include "atoms/warp.cuh"
#include "sched/tile.cuh"

struct WorkTileInfo {
    static constexpr u32 CHUNKS = sizeof(WorkTile) / 16;
    static_assert(sizeof(WorkTile) % 16 == 0, "whole 16-byte chunks");
    u32x4 chunk[CHUNKS];

    union Value {
        WorkTile work;
        u32x4 chunk[CHUNKS];
    };

    // One thread writes.
    QG_DEVICE void write(WorkTileInfo& info, const WorkTile& work) {
        const Value all = {work};
#pragma unroll
        for (u32 i = 0; i < CHUNKS; i++) st_shared(&info.chunk[i], all.chunk[i]);
    }
    // All lanes of a warp read.
    // Values are shuffled from lane 0, so that the compiler knows
    // they are uniform.
    QG_DEVICE WorkTile read(const WorkTileInfo& info) {
        Value all;
#pragma unroll
        for (u32 i = 0; i < CHUNKS; i++) {
            const u32x4 chunk = ld_shared(&info.chunk[i]);
            all.chunk[i] = {shfl_idx_u32(chunk.x, 0), shfl_idx_u32(chunk.y, 0), shfl_idx_u32(chunk.z, 0), shfl_idx_u32(chunk.w, 0)};
        }
        return all.work;
    }
};

// Tile info slots that may be unread: the tile being stored,
// plus tiles of one stage each that fill the ring.
// A slot is written when its tile's first stage is free, and
// read when this stage is full.
struct WorkTileInfoRing {
    static constexpr u32 COUNT = QG_STAGES + 1;
    WorkTileInfo info[COUNT];

    QG_DEVICE u32 next(u32 place) { return place + 1 == COUNT ? 0 : place + 1; }
    // The end marker comes in a stage without data.
    QG_DEVICE bool is_end(const WorkTile& work) { return work.begin == work.end; }
};
