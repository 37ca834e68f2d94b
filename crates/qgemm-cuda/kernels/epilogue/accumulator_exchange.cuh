// Accumulator exchange between two consumer groups that split
// the K of a tile. The second passes its sums to the first.
#pragma once
#include "atoms/sync.cuh"
#include "epilogue/warp_store.cuh"

struct AccumulatorExchange {
    f32x4 acc[THREAD_ACCUMULATORS / 4][QG_CONSUMERS];  // [vector][thread]

    // Named barriers of both groups; the first group uses barrier 1.
    // FULL: the accumulators are in shared memory.
    // EMPTY: they have been read.
    // An mbarrier would make ptxas serialize `wgmma` (C7513),
    // because its wait is a loop.
    static constexpr u32 FULL = 2, EMPTY = 3, THREADS = 2 * QG_CONSUMERS;

    // `is_first` is true for the CTA's first tile.
    QG_DEVICE void put(AccumulatorExchange& exchange, const Accumulators& acc, bool is_first, u32 thread) {
        const float* all = reinterpret_cast<const float*>(&acc);
        if (!is_first) barrier_sync(EMPTY, THREADS);
#pragma unroll
        for (u32 i = 0; i < THREAD_ACCUMULATORS; i += 4)
            st_shared(&exchange.acc[i / 4][thread], f32x4{all[i], all[i + 1], all[i + 2], all[i + 3]});
        barrier_arrive(FULL, THREADS);
    }
    QG_DEVICE void add(AccumulatorExchange& exchange, Accumulators& acc, u32 thread) {
        float* all = reinterpret_cast<float*>(&acc);
        barrier_sync(FULL, THREADS);
#pragma unroll
        for (u32 i = 0; i < THREAD_ACCUMULATORS; i += 4) {
            const f32x4 v = ld_shared(&exchange.acc[i / 4][thread]);
            all[i] += v.x, all[i + 1] += v.y, all[i + 2] += v.z, all[i + 3] += v.w;
        }
        barrier_arrive(EMPTY, THREADS);
    }
    // The putting group calls it after its last tile, so that no
    // barrier stays half complete.
    QG_DEVICE void end(bool has_put) {
        if (has_put) barrier_sync(EMPTY, THREADS);
    }
};

// A single group exchanges nothing.
struct NoExchange {
    template <class... T>
    QG_DEVICE void put(T&&...) {}
    template <class... T>
    QG_DEVICE void add(T&&...) {}
    template <class... T>
    QG_DEVICE void end(T&&...) {}
};

template <u32 GROUPS>
struct ExchangeOf {
    using type = AccumulatorExchange;
};
template <>
struct ExchangeOf<1> {
    using type = NoExchange;
};
