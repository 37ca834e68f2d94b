// Scheduler state of a warp, parked in shared memory.
// The main loop does not read it.
// 128 tokens of accumulators leave too few registers
// (`QG_STATE_IN_SHARED`) and would spill.
#pragma once
#include "atoms/memory.cuh"
#include "atoms/warp.cuh"
#include "sched/tile.cuh"

#if QG_STATE_IN_SHARED
template <class T>
struct SharedCopy {
    static_assert(sizeof(T) % 16 == 0, "whole 16-byte chunks");
    static constexpr u32 CHUNKS = sizeof(T) / 16;
    u32x4 chunk[CHUNKS];

    union Value {
        T value;
        u32x4 chunk[CHUNKS];
    };

    // All lanes of a warp call it with the same value.
    // All lanes have read the old value before.
    QG_DEVICE void store(SharedCopy& parked, const T& value, u32 lane) {
        const Value all = {value};
        warp_barrier();
        if (lane != 0) return;
#pragma unroll
        for (u32 i = 0; i < CHUNKS; i++) st_shared(&parked.chunk[i], all.chunk[i]);
    }

    // Values are shuffled from lane 0, so that the compiler knows
    // they are uniform. Otherwise it guards every branch on them
    // against divergence.
    QG_DEVICE T load(const SharedCopy& parked) {
        Value all;
        warp_barrier();
#pragma unroll
        for (u32 i = 0; i < CHUNKS; i++) {
            const u32x4 chunk = ld_shared(&parked.chunk[i]);
            all.chunk[i] = {shfl_idx_u32(chunk.x, 0), shfl_idx_u32(chunk.y, 0), shfl_idx_u32(chunk.z, 0),
                            shfl_idx_u32(chunk.w, 0)};
        }
        return all.value;
    }
};
#else
template <class T>
struct SharedCopy {
    T value;

    QG_DEVICE void store(SharedCopy& parked, const T& value, u32) { parked.value = value; }
    QG_DEVICE T load(const SharedCopy& parked) { return parked.value; }
};
#endif

// Pops the next work tile of the parked list; false at the end.
QG_DEVICE bool take_next(SharedCopy<WorkList>& parked, const GemmParams& p, WorkTile& work, u32 lane) {
    WorkList list = SharedCopy<WorkList>::load(parked);
    if (!WorkList::next(list, p, work)) return false;
    SharedCopy<WorkList>::store(parked, list, lane);
    return true;
}

// Scheduler state of one warp.
struct SchedulerState {
    SharedCopy<WorkTile> tile;
    // Work after `tile`, and work after the producer's tile.
    SharedCopy<WorkList> list, producer_list;

    // Advances to the next work tile; false at the end.
    QG_DEVICE bool next(SchedulerState& state, const GemmParams& p, u32 lane) {
        WorkTile work;
        if (!take_next(state.list, p, work, lane)) return false;
        SharedCopy<WorkTile>::store(state.tile, work, lane);
        return true;
    }
    QG_DEVICE u32 k_tiles(const SchedulerState& state) {
        const WorkTile work = SharedCopy<WorkTile>::load(state.tile);
        return work.end - work.begin;
    }
};
