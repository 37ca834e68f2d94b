// Fix-up of a tile whose K dimension several CTAs share. Every CTA writes its partial accumulators. The last CTA to
// arrive adds all of them in the order of their K ranges, so that the bits do not depend on which CTA is last. There is
// no inter-CTA spinning.
#pragma once
#include "atoms/launch.cuh"
#include "atoms/memory.cuh"
#include "atoms/sync.cuh"
#include "sched/tile.cuh"

// A barrier of the threads that hold accumulators. Producers do not take part.
QG_DEVICE void consumer_barrier() {
    if constexpr (QG_CONSUMERS == QG_THREADS)
        cta_barrier();
    else
        barrier_sync(1, QG_CONSUMERS);
}

// True for the one CTA that must finish the tile: all partial accumulators are then visible to all its threads. `flag`
// is a word of shared memory.
QG_DEVICE bool arrive_and_check_last(const GemmParams& p, const WorkTile& work, u32* flag) {
    fence_gpu();
    consumer_barrier();
    if (thread_index() == 0) {
        u32* counter = reinterpret_cast<u32*>(p.at.counters) + work.tile;
        const bool last = atomic_add_acq_rel(counter, 1) == work.peers - 1;
        // The next launch finds the counter at zero.
        if (last) st_global_relaxed_u32(counter, 0);
        st_shared(flag, (u32)last);
    }
    consumer_barrier();
    fence_gpu();
    return ld_shared(flag) != 0;
}

// True if all other peers have arrived: this CTA may then finish the tile without arriving itself.
QG_DEVICE bool check_others_arrived(const GemmParams& p, const WorkTile& work, u32* flag) {
    consumer_barrier();
    if (thread_index() == 0) {
        u32* counter = reinterpret_cast<u32*>(p.at.counters) + work.tile;
        const bool last = atomic_add_acq_rel(counter, 0) == work.peers - 1;
        if (last) st_global_relaxed_u32(counter, 0);
        st_shared(flag, (u32)last);
    }
    consumer_barrier();
    const bool last = ld_shared(flag) != 0;
    if (last) fence_gpu();
    return last;
}

// The partial accumulators of peer `peer` of `work`'s tile: `elements` floats, the same number in every call of a
// kernel.
QG_DEVICE float* partial_slot(const GemmParams& p, const WorkTile& work, u32 peer, u32 elements) {
    return reinterpret_cast<float*>(p.at.partials) + (u64)(work.first_slot + peer) * elements;
}
