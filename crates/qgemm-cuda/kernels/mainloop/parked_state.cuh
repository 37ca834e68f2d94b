// What a warp is working on, kept while it multiplies: nobody asks for it before the tile ends. In shared memory where sums of 128
// tokens leave too few registers (`QG_PARKS_STATE`: Q4_0 with f16 spilled 40 bytes on sm_80), for 142 instead of 140 us with INT4
// g128 and 512 tokens on an H200.
#pragma once
#include "atoms/memory.cuh"
#include "atoms/warp.cuh"
#include "sched/tile.cuh"

#if QG_PARKS_STATE
template <class T>
struct Kept {
    static_assert(sizeof(T) % 16 == 0, "whole units");
    static constexpr u32 UNITS = sizeof(T) / 16;
    u32x4 unit[UNITS];

    union Value {
        T value;
        u32x4 unit[UNITS];
    };

    // By all lanes of a warp, with the same value, which have read the one before.
    QG_DEVICE void put(Kept& kept, const T& value, u32 lane) {
        const Value all = {value};
        warp_barrier();
        if (lane != 0) return;
#pragma unroll
        for (u32 i = 0; i < UNITS; i++) st_shared(&kept.unit[i], all.unit[i]);
    }

    // Words come from lane 0, so that the compiler knows that all lanes have the same: it would prepare every branch that depends on
    // them for lanes that go different ways (512 tokens, INT4 g128, on an H200: 156 for 141 us).
    QG_DEVICE T take(const Kept& kept) {
        Value all;
        warp_barrier();
#pragma unroll
        for (u32 i = 0; i < UNITS; i++) {
            const u32x4 unit = ld_shared(&kept.unit[i]);
            all.unit[i] = {shfl_idx_u32(unit.x, 0), shfl_idx_u32(unit.y, 0), shfl_idx_u32(unit.z, 0), shfl_idx_u32(unit.w, 0)};
        }
        return all.value;
    }
};
#else
template <class T>
struct Kept {
    T value;

    QG_DEVICE void put(Kept& kept, const T& value, u32) { kept.value = value; }
    QG_DEVICE T take(const Kept& kept) { return kept.value; }
};
#endif

// Takes the next piece of work off `kept`; false when there is none.
QG_DEVICE bool take_next(Kept<WorkList>& kept, const GemmParams& p, TileWork& work, u32 lane) {
    WorkList list = Kept<WorkList>::take(kept);
    if (!WorkList::next(list, p, work)) return false;
    Kept<WorkList>::put(kept, list, lane);
    return true;
}

// A warp's own.
struct KeptWork {
    Kept<TileWork> tile;
    // What follows the tile, and what follows the one that the feeder is at.
    Kept<WorkList> list, ahead;

    // Goes on to the next tile; false when there is none.
    QG_DEVICE bool next(KeptWork& kept, const GemmParams& p, u32 lane) {
        TileWork work;
        if (!take_next(kept.list, p, work, lane)) return false;
        Kept<TileWork>::put(kept.tile, work, lane);
        return true;
    }
    QG_DEVICE u32 k_tiles(const KeptWork& kept) {
        const TileWork work = Kept<TileWork>::take(kept.tile);
        return work.end - work.begin;
    }
};
