// Sums of a tile on their way from groups of warps, which share the tile's K, to the first of them.
#pragma once
#include "atoms/sync.cuh"
#include "epilogue/warp_store.cuh"

template <u32 GROUPS>
struct SumExchange {
    f32x4 sums[GROUPS - 1][THREAD_SUMS / 4][QG_CONSUMERS];

    // Barriers of a group and the first (1 is the first group's own): the group's sums lie there; the first has read them. With a
    // loop that waits, in their place, the compiler makes matrix instructions wait for each other (ptxas C7513).
    QG_DEVICE constexpr u32 full(u32 group) { return 2 * group; }
    QG_DEVICE constexpr u32 empty(u32 group) { return 2 * group + 1; }
    static constexpr u32 THREADS = 2 * QG_CONSUMERS;

    // By any group but the first. `is_first` says whether the tile is the block's first.
    QG_DEVICE void put(SumExchange& exchange, const Sums& sums, u32 group, bool is_first, u32 thread) {
        const float* all = reinterpret_cast<const float*>(&sums);
        if (!is_first) barrier_sync(empty(group), THREADS);
#pragma unroll
        for (u32 i = 0; i < THREAD_SUMS; i += 4)
            st_shared(&exchange.sums[group - 1][i / 4][thread], f32x4{all[i], all[i + 1], all[i + 2], all[i + 3]});
        barrier_arrive(full(group), THREADS);
    }
    // By the first group: adds the others' sums in their order.
    QG_DEVICE void add(SumExchange& exchange, Sums& sums, u32 thread) {
        float* all = reinterpret_cast<float*>(&sums);
#pragma unroll
        for (u32 group = 1; group < GROUPS; group++) {
            barrier_sync(full(group), THREADS);
#pragma unroll
            for (u32 i = 0; i < THREAD_SUMS; i += 4) {
                const f32x4 v = ld_shared(&exchange.sums[group - 1][i / 4][thread]);
                all[i] += v.x, all[i + 1] += v.y, all[i + 2] += v.z, all[i + 3] += v.w;
            }
            barrier_arrive(empty(group), THREADS);
        }
    }
    // By a group that puts, after its last tile: no barrier is left half complete.
    QG_DEVICE void end(u32 group, bool has_put) {
        if (has_put) barrier_sync(empty(group), THREADS);
    }
};

// Of a single group.
template <>
struct SumExchange<1> {
    template <class... T>
    QG_DEVICE void put(T&&...) {}
    template <class... T>
    QG_DEVICE void add(T&&...) {}
    template <class... T>
    QG_DEVICE void end(T&&...) {}
};
