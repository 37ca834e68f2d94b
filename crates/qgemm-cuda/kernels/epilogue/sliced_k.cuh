// The end of kernels whose warps share the K dimension of a block's rows: the sums of its slices, warps that share rows,
// are added up in their order, then those of the blocks that share the tile, and stored.
#pragma once
#include "atoms/sync.cuh"
#include "epilogue/store.cuh"
#include "sched/split.cuh"

constexpr u32 SLICES = QG_THREADS / 32 / QG_WARPS_N;
constexpr u32 BLOCK_ROWS = QG_WARPS_N * QG_ROW_TILES * QG_TILE_ROWS;
constexpr u32 ELEMENTS = BLOCK_ROWS * QG_TILE_M;
constexpr u32 THREAD_ELEMENTS = (ELEMENTS + QG_THREADS - 1) / QG_THREADS;

struct SliceSums {
    // Four words of padding put the tokens that lanes write together, 2t, into different banks.
    static constexpr u32 PITCH = BLOCK_ROWS + (QG_TILE_M < 8 ? 0 : 4);
    float value[SLICES][QG_TILE_M * PITCH];

    QG_DEVICE void put(SliceSums& sums, u32 slice, u32 row, u32 token, float value) {
        st_shared(&sums.value[slice][token * PITCH + row], value);
    }
    QG_DEVICE float total(const SliceSums& sums, u32 row, u32 token) {
        float total = 0;
#pragma unroll
        for (u32 s = 0; s < SLICES; s++) total += ld_shared(&sums.value[s][token * PITCH + row]);
        return total;
    }
};

// By the whole block, after a barrier behind the last `put`. `flag` is a word of shared memory.
QG_DEVICE void store_sliced_k(const SliceSums& sums, const GemmParams& p, const TileWork& work, u32* flag, u32 thread) {
    float sum[THREAD_ELEMENTS];
#pragma unroll
    for (u32 i = 0; i < THREAD_ELEMENTS; i++) {
        const u32 element = thread + i * QG_THREADS;
        sum[i] = element < ELEMENTS ? SliceSums::total(sums, element % BLOCK_ROWS, element / BLOCK_ROWS) : 0;
    }
    if (p.shape.splits > 1) {
        float* mine = partial_slot(p, work, work.index, ELEMENTS);
#pragma unroll
        for (u32 i = 0; i < THREAD_ELEMENTS; i++)
            if (thread + i * QG_THREADS < ELEMENTS) st_global_f32(mine + thread + i * QG_THREADS, sum[i]);
        if (!arrive_and_check_last(p, work, flag)) return;
#pragma unroll
        for (u32 i = 0; i < THREAD_ELEMENTS; i++) {
            sum[i] = 0;
            if (thread + i * QG_THREADS < ELEMENTS)
                for (u32 s = 0; s < p.shape.splits; s++)
                    sum[i] += ld_global_cg_f32(partial_slot(p, work, s, ELEMENTS) + thread + i * QG_THREADS);
        }
    }
#pragma unroll
    for (u32 i = 0; i < THREAD_ELEMENTS; i++) {
        const u32 element = thread + i * QG_THREADS;
        store_by_lane(p, work.m_tile * QG_TILE_M + element / BLOCK_ROWS, work.n_tile * BLOCK_ROWS + element % BLOCK_ROWS,
                      sum[i], element < ELEMENTS);
    }
}
