// The end of kernels whose warps share the K dimension of a block's rows: the sums of its slices, warps that share rows,
// are added up in their order, then those of the blocks that share the tile, and stored.
#pragma once
#include "atoms/sync.cuh"
#include "dequant/operand.cuh"
#include "epilogue/plain.cuh"
#include "epilogue/store.cuh"
#include "sched/split.cuh"

constexpr u32 SLICES = QG_THREADS / 32 / QG_WARPS_N;
constexpr u32 WARP_ROWS = QG_ROW_TILES * QG_TILE_ROWS;
constexpr u32 CTA_ROWS = QG_WARPS_N * WARP_ROWS;
constexpr u32 ELEMENTS = CTA_ROWS * QG_TILE_M;

// The sums of one warp, in shared memory.
struct WarpAccumulators {
    // Four words of padding put the tokens that lanes write together, 2t, into different banks.
    static constexpr u32 PITCH = WARP_ROWS + (QG_TILE_M < 8 ? 0 : 4);
    alignas(16) float value[QG_TILE_M * PITCH];

    QG_DEVICE void put(WarpAccumulators& acc, u32 row, u32 token, float value) {
        st_shared(&acc.value[token * PITCH + row], value);
    }
};

// Rows that a thread adds up and stores at once: few, so that all threads have some, for what follows is one thread's latency.
constexpr u32 WIDTH = 2;

// Sums of a pair of rows over the block's part of K. `accumulators_of(i)` are those of warp i; the warps of a slice follow one another.
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

// Sums that nothing but a factor is to be done with, of rows that all lie inside. All are added up before the first is stored, so
// that their latencies overlap. A thread stores the same rows of several tokens: no addresses are found anew.
template <class AccumulatorsOf>
QG_DEVICE void store_products(const GemmParams& p, u32 first_token, u32 first_row, u32 thread,
                              AccumulatorsOf accumulators_of) {
    constexpr u32 ROW_THREADS = CTA_ROWS / WIDTH, TOKENS_AT_ONCE = QG_THREADS / ROW_THREADS;
    constexpr u32 PASSES = (QG_TILE_M + TOKENS_AT_ONCE - 1) / TOKENS_AT_ONCE;
    static_assert(TOKENS_AT_ONCE > 0, "a thread has a pair of rows at most");
    const u32 row = thread % ROW_THREADS * WIDTH, first = thread / ROW_THREADS;
    if (first >= TOKENS_AT_ONCE || first >= QG_TILE_M) return;
    const float alpha = p.shape.alpha;
    float v[PASSES][WIDTH];
#pragma unroll
    for (u32 i = 0; i < PASSES; i++) {
        const u32 token = first + i * TOKENS_AT_ONCE;
        reduce_slices(v[i], token < QG_TILE_M ? token : first, row, accumulators_of);
        v[i][0] *= alpha, v[i][1] *= alpha;
    }
    float scale[WIDTH] = {1, 1};
    if constexpr (!Operands::HAS_SCALE) {
        if (p.shape.flags & QG_FLAG_ROW_SCALE)
            load_dense_run(scale, DTYPE_F32, p.at.row_scale, first_row + row, true, WIDTH);
    }
#pragma unroll
    for (u32 i = 0; i < PASSES; i++) {
        const u32 token = first + i * TOKENS_AT_ONCE;
        v[i][0] *= scale[0], v[i][1] *= scale[1];
        if (token < QG_TILE_M && first_token + token < p.shape.m)
            store_dense_run(QG_X_DTYPE, p.at.d, (first_token + token) * p.at.d_row + first_row + row, true, WIDTH,
                            v[i]);
    }
}

// All other outputs, those of tiles that several blocks share among them.
template <class AccumulatorsOf>
QG_DEVICE void store_others(const GemmParams& p, u32* flag, u32 thread, AccumulatorsOf accumulators_of) {
    const WorkTile work = WorkTile::of_grid(p);
    const auto lift_level = [&](u32 split, u32 token, u32 row) {
        return partial_slot(p, work, split, ELEMENTS) + token * CTA_ROWS + row;
    };
    if (p.shape.splits > 1) {
#pragma unroll 1
        for (u32 at = thread * WIDTH; at < ELEMENTS; at += QG_THREADS * WIDTH) {
            const u32 token = at / CTA_ROWS, row = at % CTA_ROWS;
            float acc[WIDTH];
            reduce_slices(acc, token, row, accumulators_of);
            float* mine = lift_level(work.index, token, row);
            st_global_f32(mine, acc[0]), st_global_f32(mine + 1, acc[1]);
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
            acc[0] = acc[1] = 0;
            for (u32 split = 0; split < p.shape.splits; split++) {
                const float* part = lift_level(split, token, row);
                acc[0] += ld_global_cg_f32(part), acc[1] += ld_global_cg_f32(part + 1);
            }
        });
}

// Whether nothing but a factor is to be done with the block's sums. Asked before the barrier behind the last `put`, where the
// answer is not waited for.
QG_DEVICE bool are_products(const GemmParams& p) {
    constexpr u32 OTHERS = QG_FLAG_BIAS | (Operands::HAS_SCALE ? QG_FLAG_ROW_SCALE : 0);
    const bool inside = (cta_index().x + 1) * CTA_ROWS <= p.shape.features;
    return is_plain(p) && !(p.shape.flags & OTHERS) && p.shape.splits == 1 && inside;
}

// By the whole block, after a barrier behind the last `put`. `flag` is a word of shared memory. Products alone have code of their
// own, as little as possible and in one piece, because no other work hides how long it takes to fetch: of a block with 64 rows the
// way past all that was not asked for took 2.0 us for eight tokens, 3.7 for 16 (0.5 and 0.9 so, on an H200).
template <class AccumulatorsOf>
QG_DEVICE void store_sliced_k(const GemmParams& p, bool products, u32* flag, u32 thread,
                              AccumulatorsOf accumulators_of) {
    if (products)
        store_products(p, cta_index().y * QG_TILE_M, cta_index().x * CTA_ROWS, thread, accumulators_of);
    else
        store_others(p, flag, thread, accumulators_of);
}
