// Epilogue of sliced-K kernels.
// Slices are warps with equal rows. Their accumulators
// are added in slice order, then over the CTAs of the
// tile, and stored.
#pragma once
#include "atoms/cg_pair.cuh"
#include "atoms/opaque_register.cuh"
#include "atoms/sync.cuh"
#include "dequant/operand.cuh"
#include "epilogue/plain.cuh"
#include "epilogue/store.cuh"
#include "sched/split.cuh"

constexpr u32 SLICES = QG_THREADS / 32 / QG_WARPS_N;
constexpr u32 WARP_ROWS = QG_ROW_TILES * QG_TILE_ROWS;
constexpr u32 CTA_ROWS = QG_WARPS_N * WARP_ROWS;
constexpr u32 ELEMENTS = CTA_ROWS * QG_TILE_M;

// Accumulators of one warp, in shared memory.
struct WarpAccumulators {
    // Four words of padding:
    // the tokens 2t that lanes write together use different banks.
    static constexpr u32 PITCH = WARP_ROWS + (QG_TILE_M < 8 ? 0 : 4);
    alignas(16) float value[QG_TILE_M * PITCH];  // [token][row of W]

    QG_DEVICE void put(WarpAccumulators& acc, u32 row, u32 token, float value) {
        st_shared(&acc.value[token * PITCH + row], value);
    }
};

// Rows per thread and step.
// Few, so that all threads have work: the epilogue takes the
// latency of one thread.
constexpr u32 WIDTH = 2;

// Adds the slices' accumulators of two rows.
// `accumulators_of(i)` belongs to warp i; the warps of a slice
// are consecutive.
template <class AccumulatorsOf>
QG_DEVICE void reduce_slices(float (&acc)[WIDTH], u32 token, u32 row, AccumulatorsOf accumulators_of) {
    acc[0] = acc[1] = 0;
#pragma unroll
    for (u32 slice = 0; slice < SLICES; slice++) {
        const WarpAccumulators& part = accumulators_of(slice * QG_WARPS_N + row / WARP_ROWS);
        const f32x2 v =
            ld_shared(reinterpret_cast<const f32x2*>(&part.value[token * WarpAccumulators::PITCH + row % WARP_ROWS]));
        acc[0] += v.x, acc[1] += v.y;
    }
    acc[0] *= FROM_UNITS, acc[1] *= FROM_UNITS;
}

// Partial-sum pairs that a thread loads at once.
// `peers_at_once`: peers per step, for `pairs` pairs of each.
constexpr u32 LOADS_AT_ONCE = 8;
QG_DEVICE constexpr u32 peers_at_once(u32 pairs) {
    return pairs >= LOADS_AT_ONCE ? 1 : pairs > 2 ? LOADS_AT_ONCE / pairs : 4;
}

// Stores outputs that are only scaled; all rows lie inside D.
// All slices are added before the first store, to
// overlap latencies.
// A thread stores the same rows of several tokens, so it
// computes addresses once.
// IS_SHARED: split-K fix-up by the last CTA to arrive, in
// order of the peers' K ranges.
template <bool IS_SHARED, class AccumulatorsOf>
QG_DEVICE void store_products(const GemmParams& p, u32 first_token, u32 first_row, u32* flag, u32 thread,
                              AccumulatorsOf accumulators_of) {
    constexpr u32 ROW_THREADS = CTA_ROWS / WIDTH, TOKENS_AT_ONCE = QG_THREADS / ROW_THREADS;
    constexpr u32 PASSES = (QG_TILE_M + TOKENS_AT_ONCE - 1) / TOKENS_AT_ONCE;
    static_assert(TOKENS_AT_ONCE > 0, "a thread has a pair of rows at most");
    const u32 row = thread % ROW_THREADS * WIDTH, first = thread / ROW_THREADS;
    const bool has_rows = first < TOKENS_AT_ONCE && first < QG_TILE_M;
    if (!IS_SHARED && !has_rows) return;
    const auto has = [&](u32 i) { return has_rows && first + i * TOKENS_AT_ONCE < QG_TILE_M; };
    float v[PASSES][WIDTH];
#pragma unroll
    for (u32 i = 0; i < PASSES; i++)
        reduce_slices(v[i], has(i) ? first + i * TOKENS_AT_ONCE : first % QG_TILE_M, row, accumulators_of);
    if constexpr (IS_SHARED) {
        const WorkTile work = WorkTile::of_grid(p);
        const auto part = [&](u32 split, u32 i) {
            float* const all = partial_slot(p, work, split, ELEMENTS) + first * CTA_ROWS + row;
            return reinterpret_cast<f32x2*>(all + i * (TOKENS_AT_ONCE * CTA_ROWS));
        };
#pragma unroll
        for (u32 i = 0; i < PASSES; i++)
            if (has(i)) st_global_f32x2(part(work.index, i), f32x2{v[i][0], v[i][1]});
        if (!arrive_and_check_last(p, work, flag) || !has_rows) return;
        f32x2 sums[PASSES] = {};
        add_peers<peers_at_once(PASSES)>(sums, work.peers, [&](u32 split, u32 i) {
            return has(i) ? ld_global_cg_f32x2(part(split, i)) : f32x2{};
        });
#pragma unroll
        for (u32 i = 0; i < PASSES; i++) v[i][0] = sums[i].x, v[i][1] = sums[i].y;
    }
    float scale[WIDTH] = {1, 1};
    if constexpr (!Operands::HAS_SCALE) {
        if (p.shape.flags & QG_FLAG_ROW_SCALE)
            load_dense_run(scale, DTYPE_F32, p.at.row_scale, first_row + row, true, WIDTH);
    }
    const float alpha = p.shape.alpha;
#pragma unroll
    for (u32 i = 0; i < PASSES; i++) {
        const u32 token = first + i * TOKENS_AT_ONCE;
        v[i][0] = v[i][0] * alpha * scale[0], v[i][1] = v[i][1] * alpha * scale[1];
        u32 own;
        if (token < QG_TILE_M && find_row(p, first_token + token, own))
            store_dense_run(QG_X_DTYPE, p.at.d, own * p.at.d_row + first_row + row, true, WIDTH, v[i]);
    }
}

// Stores all other outputs, with or without split-K.
template <class AccumulatorsOf>
QG_DEVICE void store_others(const GemmParams& p, u32* flag, u32 thread, AccumulatorsOf accumulators_of) {
    const WorkTile work = WorkTile::of_grid(p);
    const auto part = [&](u32 split, u32 token, u32 row) {
        return reinterpret_cast<f32x2*>(partial_slot(p, work, split, ELEMENTS) + token * CTA_ROWS + row);
    };
    if (p.shape.splits > 1) {
#pragma unroll 1
        for (u32 at = thread * WIDTH; at < ELEMENTS; at += QG_THREADS * WIDTH) {
            const u32 token = at / CTA_ROWS, row = at % CTA_ROWS;
            float acc[WIDTH];
            reduce_slices(acc, token, row, accumulators_of);
            st_global_f32x2(part(work.index, token, row), f32x2{acc[0], acc[1]});
        }
        if (!arrive_and_check_last(p, work, flag)) return;
    }
    store_runs<QG_TILE_M, CTA_ROWS, QG_THREADS, WIDTH>(
        p, work.m_tile * QG_TILE_M, work.n_tile * CTA_ROWS, thread, [&](u32 token, u32 run, float (&acc)[WIDTH]) {
            const u32 row = run * WIDTH;
            if (p.shape.splits == 1) {
                reduce_slices(acc, token, row, accumulators_of);
                return;
            }
            f32x2 sum[1] = {};
            add_peers<peers_at_once(1)>(sum, work.peers,
                                        [&](u32 split, u32) { return ld_global_cg_f32x2(part(split, token, row)); });
            acc[0] = sum[0].x, acc[1] = sum[0].y;
        });
}

// Whether the CTA's outputs are only scaled.
// Ask before the barrier that follows the last `put`, where
// the answer's latency is hidden.
QG_DEVICE bool are_products(const GemmParams& p) {
    constexpr u32 OTHERS = QG_FLAG_BIAS | (Operands::HAS_SCALE ? QG_FLAG_ROW_SCALE : 0);
    const bool inside = (cta_index().x + 1) * CTA_ROWS <= p.shape.out_features;
    return is_plain(p) && !(p.shape.flags & OTHERS) && inside;
}

// The whole CTA calls it after a barrier behind the last `put`.
// `flag` is a word of shared memory.
// Scaled-only outputs have short code without branches,
// because nothing hides instruction fetch here.
template <class AccumulatorsOf>
QG_DEVICE void store_sliced_k(const GemmParams& p, bool products, u32* flag, u32 thread,
                              AccumulatorsOf accumulators_of) {
    // Opaque values: the compiler otherwise shares subexpressions
    // with main-loop addresses, and recomputes or spills those.
    thread = opaque_register(thread);
    const u32 first_token = opaque_register(WorkTile::of_grid(p).m_tile) * QG_TILE_M;
    const u32 first_row = opaque_register(cta_index().x) * CTA_ROWS;
    if (!products)
        store_others(p, flag, thread, accumulators_of);
    else if (!QG_EXPERTS && p.shape.splits > 1)
        store_products<true>(p, first_token, first_row, flag, thread, accumulators_of);
    else
        store_products<false>(p, first_token, first_row, flag, thread, accumulators_of);
}
