// Sums of a tile on their way from the second of two groups of warps, which share the tile's K, to the first.
#pragma once
#include "atoms/mbarrier.cuh"
#include "atoms/warp.cuh"
#include "epilogue/warp_store.cuh"

struct SumExchange {
    f32x4 sums[THREAD_SUMS / 4][QG_CONSUMERS];
    u64 full, empty;

    // By one thread, before a block barrier.
    QG_DEVICE void init(SumExchange& exchange) {
        mbarrier_init(&exchange.full, QG_WARPS_N);
        mbarrier_init(&exchange.empty, QG_WARPS_N);
        fence_mbarrier_init();
    }

    // `parity` is that of the block's tiles.
    QG_DEVICE void put(SumExchange& exchange, const Sums& sums, u32 parity, u32 thread) {
        const float* all = reinterpret_cast<const float*>(&sums);
        mbarrier_wait(&exchange.empty, parity ^ 1);
#pragma unroll
        for (u32 i = 0; i < THREAD_SUMS; i += 4)
            st_shared(&exchange.sums[i / 4][thread], f32x4{all[i], all[i + 1], all[i + 2], all[i + 3]});
        arrive(&exchange.full, thread);
    }
    QG_DEVICE void add(SumExchange& exchange, Sums& sums, u32 parity, u32 thread) {
        float* all = reinterpret_cast<float*>(&sums);
        mbarrier_wait(&exchange.full, parity);
#pragma unroll
        for (u32 i = 0; i < THREAD_SUMS; i += 4) {
            const f32x4 v = ld_shared(&exchange.sums[i / 4][thread]);
            all[i] += v.x, all[i + 1] += v.y, all[i + 2] += v.z, all[i + 3] += v.w;
        }
        arrive(&exchange.empty, thread);
    }
    QG_DEVICE void arrive(u64* barrier, u32 thread) {
        warp_barrier();
        if (thread % 32 == 0) mbarrier_arrive(barrier);
    }
};

// Of a single group.
struct NoExchange {
    template <class... T>
    QG_DEVICE void init(T&&...) {}
    template <class... T>
    QG_DEVICE void put(T&&...) {}
    template <class... T>
    QG_DEVICE void add(T&&...) {}
};

template <u32 GROUPS>
struct ExchangeOf {
    using type = SumExchange;
};
template <>
struct ExchangeOf<1> {
    using type = NoExchange;
};
