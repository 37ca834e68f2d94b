// Producer warpgroup of FP8 MoE GEMM.
// The rows of an expert are contiguous.
// One warp copies X and one copies W, both by TMA; further
// warps copy scales.
// Boxes of X may include rows of the next expert,
// which are ignored.
// All lanes iterate over the tiles, because the tile search
// works on a whole warp.
#pragma once
#include "mainloop/sm90/fp8_scales.cuh"

// Problem of an expert's rows.
QG_DEVICE Fp8GemmParams problem_of(const Fp8GemmParams& params, const OwnRows& own) {
    Fp8GemmParams of_expert = params;
    OwnRows::narrow(own, of_expert.gemm);
    of_expert.x_scales += own.first * params.x_scale_row;
    return of_expert;
}

// The warp that copies X. It also publishes tile info and
// arrives on full barriers for X and W.
QG_DEVICE void produce_expert_x(Pipeline& pipeline, WorkTileInfoRing& infos, const TmaFp8GemmParams& params, u32 lane) {
    const GemmParams& p = params.fp8.gemm;
    WorkList list = WorkList::of_cta(p);
    WorkTile work;
    Position at = {};
    u32 info = 0;
    while (WorkList::next(list, p, work)) {
        Position::wait_empty(at, pipeline);
        if (lane == 0) WorkTileInfo::write(infos.info[info], work);
        info = WorkTileInfoRing::next(info);
#pragma unroll 1
        for (u32 k = work.begin; k < work.end; k++) {
            Position::wait_empty(at, pipeline);
            u64* full = &pipeline.full[Position::stage(at)];
            if (lane == 0) {
                const u32 boxes = X_BOX < QG_TILE_M ? (work.own.rows + X_BOX - 1) / X_BOX : 1;
                mbarrier_arrive_expect_tx(full, boxes * X_BOX * STAGE_K + W_COPIED);
#pragma unroll
                for (u32 i = 0; i < QG_TILE_M / X_BOX; i++)
                    if (i < boxes)
                        cp_async_bulk_tensor_2d(pipeline.x[Position::stage(at)] + i * X_BOX * STAGE_K, &params.x_map, (i32)(k * STAGE_K),
                                                (i32)(work.own.first + i * X_BOX), full);
            }
            Position::next(at);
        }
    }
    Position::wait_empty(at, pipeline);
    if (lane == 0) {
        WorkTileInfo::write(infos.info[info], {});
        mbarrier_arrive(&pipeline.full[Position::stage(at)]);
    }
}

// The warp that copies W. Row tiles of all
// experts are contiguous.
QG_DEVICE void produce_expert_w(Pipeline& pipeline, const TmaFp8GemmParams& params, u32 lane) {
    const GemmParams& p = params.fp8.gemm;
    WorkList list = WorkList::of_cta(p);
    WorkTile work;
    Position at = {};
    while (WorkList::next(list, p, work)) {
        const u32 first_row = work.own.expert * p.groups.row_pitch + work.n_tile * QG_TILE_N;
#pragma unroll 1
        for (u32 k = work.begin; k < work.end; k++) {
            Position::wait_empty(at, pipeline);
            if (lane == 0) copy_w(pipeline, at, params, first_row, k);
            Position::next(at);
        }
    }
}

// Scale warp `warp`.
QG_DEVICE void produce_expert_scales(Pipeline& pipeline, const Fp8GemmParams& params, u32 warp, u32 lane) {
    WorkList list = WorkList::of_cta(params.gemm);
    WorkTile work;
    Position at = {};
    while (WorkList::next(list, params.gemm, work))
        copy_scales(pipeline, at, problem_of(params, work.own), 0, work.n_tile * QG_TILE_N, work.begin, work.end, warp, lane);
    end_scales(pipeline, at, lane);
}

// Work of the producer warpgroup; `thread` is its thread index.
// The last CTA has the fewest tiles.
// It then validates the index, with `words` in shared memory.
QG_DEVICE void produce_experts(Pipeline& pipeline, WorkTileInfoRing& infos, const TmaFp8GemmParams& params, u32 thread, u32* words) {
    constexpr u32 THREADS = 128, BARRIER = 4;
    const u32 warp = shfl_idx_u32(thread / 32, 0), lane = thread % 32;
    // The previous launch may write the index, which selects W.
    griddepcontrol_wait();
    if (warp == 0) produce_expert_x(pipeline, infos, params, lane);
    if (warp == 1) produce_expert_w(pipeline, params, lane);
    if (HAS_BLOCK_SCALES && warp >= 2 && warp < 2 + SCALE_WARPS) produce_expert_scales(pipeline, params.fp8, warp - 2, lane);
    if (cta_index().x + 1 == grid_ctas().x)
        store_faults<THREADS>(params.fp8.gemm.groups, words, thread, [] { barrier_sync(BARRIER, THREADS); });
}
