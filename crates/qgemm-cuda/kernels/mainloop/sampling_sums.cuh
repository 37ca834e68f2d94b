// Integer sums over a row of logits by one CTA:
// prefix sums, and the first token that reaches one.
#pragma once
#include "atoms/launch.cuh"
#include "atoms/shared_atomic.cuh"
#include "atoms/sync.cuh"
#include "atoms/warp.cuh"
#include "mainloop/sampling_params.cuh"
#include "mainloop/warp_max.cuh"
#include "sched/lane_sums.cuh"

constexpr u32 WARPS = QG_THREADS / 32;
// Bins of a histogram over one digit of the orders.
constexpr u32 BINS = 2048, THREAD_BINS = BINS / QG_THREADS;
static_assert(WARPS <= 32 && BINS % QG_THREADS == 0, "a lane for each warp, whole bins for each thread");
// Vectors of four orders that a thread loads together.
constexpr u32 TOGETHER = 4;

struct SharedStorage {
    u64 of_warps[32];
    u64 left;
    u32 found, ended;
    // Sums of bins: low words, and carries out of them.
    u32 low[BINS];
    u32 high[BINS];
};
static_assert(sizeof(SharedStorage) == QG_SHARED_BYTES, "the host computes another size");

// A row of logits, or of orders that earlier kernels made.
struct Row {
    const u8* words;
    u32 vocabulary;
    bool has_orders;

    QG_DEVICE Row of_logits(const SamplingParams& p, u32 row) {
        return {word_at(p.at.logits, row * p.at.logits_row), p.shape.vocabulary, false};
    }
    QG_DEVICE Row of_orders(const SamplingParams& p, u32 row) {
        return {word_at(p.at.orders, (u64)row * p.shape.vocabulary), p.shape.vocabulary, true};
    }
    __device__ __forceinline__ u32 word(u32 id) const { return ld_global_u32(words + (u64)id * 4); }
    __device__ __forceinline__ u32 order(u32 id) const { return has_orders ? word(id) : order_of(word(id)); }
    // Calls `visit` with the ids from `begin` to `end` that thread
    // `index` of `threads` has, ascending, and their orders.
    template <class F>
    __device__ __forceinline__ void each(u32 begin, u32 end, u32 index, u32 threads, F&& visit) const {
        const u8* const from = words + (u64)begin * 4;
        // Rows of some vocabularies are not aligned for vectors.
        const u32 vectors = (u64)from % 16 == 0 ? (end - begin) / 4 : 0;
        for (u32 first = index; first < vectors; first += threads * TOGETHER) {
            // Without a branch, all loads are in flight together.
            u32x4 loaded[TOGETHER];
#pragma unroll
            for (u32 i = 0; i < TOGETHER; i++) {
                const u32 vector = first + i * threads;
                loaded[i] = ld_global_v4(from + (u64)(vector < vectors ? vector : first) * 16);
            }
#pragma unroll
            for (u32 i = 0; i < TOGETHER; i++) {
                const u32 vector = first + i * threads, id = begin + vector * 4;
                if (vector >= vectors) continue;
                const u32 four[4] = {loaded[i].x, loaded[i].y, loaded[i].z, loaded[i].w};
#pragma unroll
                for (u32 j = 0; j < 4; j++) visit(id + j, has_orders ? four[j] : order_of(four[j]));
            }
        }
        for (u32 id = begin + vectors * 4 + index; id < end; id += threads) visit(id, order(id));
    }
};

// Sums over the threads before this one, and over all.
struct Prefix {
    u64 before, total;
};

QG_DEVICE Prefix cta_prefix(SharedStorage& shared, u64 own) {
    const u32 lane = thread_index() % 32, warp = thread_index() / 32;
    const u64 through = sum_up_to_lane(own);
    cta_barrier();
    if (lane == 31) st_shared(&shared.of_warps[warp], through);
    cta_barrier();
    const u64 warps = sum_up_to_lane(lane < WARPS ? ld_shared(&shared.of_warps[lane]) : (u64)0);
    const u64 before_warp = of_lane(warps, warp) - of_lane(through, 31);
    return {before_warp + through - own, of_lane(warps, 31)};
}

// The most likely token: largest order, lowest id.
struct Best {
    u32 order, id;

    // Whether this token precedes another one.
    __device__ __forceinline__ bool precedes(const Best& other) const {
        return order > other.order || (order == other.order && id < other.id);
    }
    __device__ __forceinline__ Best of_warp() const {
        const u32 largest = warp_max(order);
        return {largest, ~warp_max(order == largest ? ~id : 0u)};
    }
};

// The most likely token over all threads.
QG_DEVICE Best cta_best(SharedStorage& shared, Best own) {
    const u32 lane = thread_index() % 32;
    own = own.of_warp();
    cta_barrier();
    if (lane == 0) st_shared(&shared.of_warps[thread_index() / 32], (u64)own.order << 32 | own.id);
    cta_barrier();
    const u64 other = lane < WARPS ? ld_shared(&shared.of_warps[lane]) : NO_TOKEN;
    return Best{(u32)(other >> 32), (u32)other}.of_warp();
}

// The most likely token after `last`.
QG_DEVICE Best best_after(SharedStorage& shared, const Row& row, const Best& last) {
    Best own = {EXCLUDED, NO_TOKEN};
    row.each(0, row.vocabulary, thread_index(), QG_THREADS, [&](u32 id, u32 order) {
        const Best token = {order, id};
        if (order > own.order && last.precedes(token)) own = token;
    });
    return cta_best(shared, own);
}

// The first token in order of ids whose running sum of
// `measure` reaches `wanted`, given the sum of all.
template <class F, class W>
QG_DEVICE u32 find_token(SharedStorage& shared, const Row& row, F&& measure, W&& wanted) {
    const u32 thread = thread_index(), lane = thread % 32, warp = thread / 32;
    // Each warp sums consecutive tokens.
    const u32 share = (row.vocabulary + QG_THREADS - 1) / QG_THREADS * 32;
    const auto least = [](u32 a, u32 b) { return a < b ? a : b; };
    u64 own = 0;
    row.each(least(row.vocabulary, warp * share), least(row.vocabulary, (warp + 1) * share), lane, 32,
             [&](u32 id, u32 order) { own += measure(id, order); });
    const Prefix of_all = cta_prefix(shared, own);
    const u64 target = wanted(of_all.total);
    const u64 before = of_lane(of_all.before, 0), through = of_lane(of_all.before + own, 31);
    if (lane == 0 && before < target && target <= through) {
        st_shared(&shared.found, warp * share);
        st_shared(&shared.left, target - before);
    }
    cta_barrier();
    // Each thread sums consecutive tokens of that warp.
    const u32 each = (share + QG_THREADS - 1) / QG_THREADS, of_warp = ld_shared(&shared.found);
    const u64 left = ld_shared(&shared.left);
    const u32 end = least(row.vocabulary, of_warp + share);
    const u32 begin = least(end, of_warp + thread * each), own_end = least(end, begin + each);
    own = 0;
    for (u32 id = begin; id < own_end; id++) own += measure(id, row.order(id));
    u64 sum = cta_prefix(shared, own).before;
    if (sum < left && left <= sum + own) {
        u32 id = begin;
        while (id + 1 < own_end && (sum += measure(id, row.order(id))) < left) id++;
        st_shared(&shared.found, id);
    }
    cta_barrier();
    return ld_shared(&shared.found);
}
