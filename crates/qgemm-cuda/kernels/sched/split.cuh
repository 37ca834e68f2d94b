// Split-K fix-up. Every CTA writes its partial sums.
// The last CTA to arrive adds all of them in order of K.
// So the bits do not depend on which CTA is last.
// No CTA spins on another.
#pragma once
#include "atoms/launch.cuh"
#include "atoms/memory.cuh"
#include "atoms/sync.cuh"
#include "sched/peers.cuh"
#include "sched/tile.cuh"

// Barrier of the consumer threads, which hold accumulators.
QG_DEVICE void consumer_barrier() {
    if constexpr (QG_CONSUMERS == QG_THREADS)
        cta_barrier();
    else
        barrier_sync(1, QG_CONSUMERS);
}

// Increment of a tile's counter for one arrival.
// With clusters each rank has 16 bits of the counter.
static_assert(QG_CLUSTER <= 2, "a counter has room for two");
QG_DEVICE u32 arrival() {
    return 1u << (QG_CLUSTER > 1 ? cta_index().x % QG_CLUSTER * 16 : 0);
}
// Arrivals of this rank in the counter value.
QG_DEVICE u32 arrived(u32 counter) {
    return QG_CLUSTER > 1 ? counter >> (cta_index().x % QG_CLUSTER * 16) & 0xffffu : counter;
}
// The next launch needs a zero counter.
QG_DEVICE void reset_counter(u32* counter, u32 peers) {
    if constexpr (QG_CLUSTER > 1)
        atomic_add_relaxed(counter, 0 - peers * arrival());
    else
        st_global_relaxed_u32(counter, 0);
}

// True in the CTA that must finish the tile.
// All partial sums are then visible to all its threads:
// the barriers extend one thread's arrival to all threads, so
// no thread needs a separate fence (PTX ISA, "memory
// consistency model": causality order).
// `flag` is a word of shared memory.
QG_DEVICE bool arrive_and_check_last(const GemmParams& p, const WorkTile& work, u32* flag) {
    consumer_barrier();
    if (thread_index() == 0) {
        u32* counter = reinterpret_cast<u32*>(p.at.counters) + work.tile;
        const bool last = arrived(atomic_add_acq_rel(counter, arrival())) == work.peers - 1;
        if (last) reset_counter(counter, work.peers);
        st_shared(flag, (u32)last);
    }
    consumer_barrier();
    return ld_shared(flag) != 0;
}

// True if all other peers have arrived.
// This CTA may then finish the tile without an arrival.
QG_DEVICE bool check_others_arrived(const GemmParams& p, const WorkTile& work, u32* flag) {
    consumer_barrier();
    if (thread_index() == 0) {
        u32* counter = reinterpret_cast<u32*>(p.at.counters) + work.tile;
        const bool last = arrived(atomic_add_acq_rel(counter, 0)) == work.peers - 1;
        // This CTA did not arrive.
        if (last) reset_counter(counter, work.peers - 1);
        st_shared(flag, (u32)last);
    }
    consumer_barrier();
    return ld_shared(flag) != 0;
}

// Partial sums of peer `peer` of the tile: `elements` floats.
// `elements` must be the same in every call of a kernel.
QG_DEVICE float* partial_slot(const GemmParams& p, const WorkTile& work, u32 peer, u32 elements) {
    return reinterpret_cast<float*>(p.at.partials) + (u64)(work.first_slot + peer) * elements;
}

// Split-K fix-up of accumulators in shared memory, in K order.
// Returns false in all CTAs but the last.
// `place(i)` is the address of accumulators i..i+3.
// A thread moves several vectors at once to overlap latencies.
template <u32 ELEMENTS, class Place>
QG_DEVICE bool add_shared_partials(const GemmParams& p, const WorkTile& work, u32* flag, Place place) {
    constexpr u32 OWN = (ELEMENTS / 4 + QG_THREADS - 1) / QG_THREADS, AT_ONCE = OWN < 4 ? OWN : 4, NEXT = QG_THREADS * 4;
    static_assert(ELEMENTS % 4 == 0, "accumulators are moved four at a time");
    float* mine = partial_slot(p, work, work.index, ELEMENTS);
    const u32 own = thread_index() * 4;
#pragma unroll 1
    for (u32 first = own; first < ELEMENTS; first += AT_ONCE * NEXT) {
#pragma unroll
        for (u32 i = first; i < first + AT_ONCE * NEXT; i += NEXT)
            if (i < ELEMENTS) st_global_f32x4(reinterpret_cast<f32x4*>(mine + i), ld_shared(place(i)));
    }
    if (!arrive_and_check_last(p, work, flag)) return false;
#pragma unroll 1
    for (u32 first = own; first < ELEMENTS; first += AT_ONCE * NEXT) {
        f32x4 acc[AT_ONCE] = {};
        add_peers<1>(acc, work.peers, [&](u32 peer, u32 i) {
            const float* theirs = partial_slot(p, work, peer, ELEMENTS) + first + i * NEXT;
            return first + i * NEXT < ELEMENTS ? ld_global_cg_f32x4(reinterpret_cast<const f32x4*>(theirs)) : f32x4{};
        });
#pragma unroll
        for (u32 i = 0; i < AT_ONCE; i++)
            if (first + i * NEXT < ELEMENTS) st_shared(place(first + i * NEXT), acc[i]);
    }
    cta_barrier();
    return true;
}
