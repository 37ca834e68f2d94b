// What the producer of X tells consumers of the CTA's tiles, in shared memory. Consumers that found them by themselves took 700 cycles a
// tile for it, and the compiler, which did not know any more that a warp's lanes go one way, kept places of the ring in registers of every
// lane and made the main loop's head ready for lanes that part.
#pragma once
#include "atoms/memory.cuh"
#include "atoms/warp.cuh"
#include "sched/tile.cuh"

struct WorkTileNote {
    static constexpr u32 CHUNKS = sizeof(WorkTile) / 16;
    static_assert(sizeof(WorkTile) % 16 == 0, "whole 16-byte chunks");
    u32x4 chunk[CHUNKS];

    union Value {
        WorkTile work;
        u32x4 chunk[CHUNKS];
    };

    // For one thread.
    QG_DEVICE void write(WorkTileNote& note, const WorkTile& work) {
        const Value all = {work};
#pragma unroll
        for (u32 i = 0; i < CHUNKS; i++) st_shared(&note.chunk[i], all.chunk[i]);
    }
    // For all lanes of a warp. Words come from lane 0, so that the compiler knows that they are uniform.
    QG_DEVICE WorkTile read(const WorkTileNote& note) {
        Value all;
#pragma unroll
        for (u32 i = 0; i < CHUNKS; i++) {
            const u32x4 chunk = ld_shared(&note.chunk[i]);
            all.chunk[i] = {shfl_idx_u32(chunk.x, 0), shfl_idx_u32(chunk.y, 0), shfl_idx_u32(chunk.z, 0), shfl_idx_u32(chunk.w, 0)};
        }
        return all.work;
    }
};

// Notes that may be read still: of a tile that is being stored, and of tiles of a stage each behind it that fill the ring. A note is
// written when the first stage of its tile is free, and read when that is full.
struct WorkTileNotes {
    static constexpr u32 COUNT = QG_STAGES + 1;
    WorkTileNote note[COUNT];

    QG_DEVICE u32 next(u32 place) { return place + 1 == COUNT ? 0 : place + 1; }
    // Behind the last tile there is a note of none, in a stage that only producers arrive at.
    QG_DEVICE bool is_end(const WorkTile& work) { return work.begin == work.end; }
};
