// Producer warpgroup of block-scaled MoE GEMM.
// The rows of an expert are contiguous.
// TMA copies a whole tile of X; rows of the next expert may
// come along and are ignored.
// All lanes iterate over the tiles, because the tile search
// works on a whole warp.
#pragma once
#include "mainloop/sm120/block_scaled_pipeline.cuh"

#if QG_EXPERT_TILES
// Problem of a tile's rows and their expert.
// TMA locates the codes of X.
QG_DEVICE BlockScaledParams problem_of(const BlockScaledParams& params, const WorkTile& work) {
    BlockScaledParams own = params;
    OwnRows::narrow(work.own, own.gemm);
    own.x_scales += work.own.first * params.x_scale_row;
    if (params.x_factors != 0) own.x_factors += work.own.first * params.x_factor_row;
    return own;
}

// The warp that copies X; it arrives on full
// barriers for X and W.
QG_DEVICE void produce_expert_x(Pipeline& pipeline, const TmaBlockScaledParams& params, u32 lane) {
    const GemmParams& p = params.x.gemm;
    WorkList list = WorkList::of_cta(p);
    WorkTile work;
    Position at = {};
    while (WorkList::next(list, p, work)) {
#pragma unroll 1
        for (u32 k = work.begin; k < work.end; k++) {
            Position::wait_empty(at, pipeline.empty);
            u64* full = &pipeline.full[at.stage];
            if (lane == 0) {
                mbarrier_arrive_expect_tx(full, QG_TILE_M * X_STAGE_BYTES + CTA_ROW_TILES * W_STAGE_BYTES);
                cp_async_bulk_tensor_2d(pipeline.x[at.stage], &params.x_map, (i32)(k * X_STAGE_BYTES), (i32)work.own.first, full);
            }
            Position::next(at);
        }
    }
}

// A warp that copies W, and the warp that copies scales of X.
QG_DEVICE void produce_expert_w(Pipeline& pipeline, const GemmParams& p, u32 warp, u32 lane) {
    WorkList list = WorkList::of_cta(p);
    WorkTile work;
    Position at = {};
    while (WorkList::next(list, p, work)) produce_w_tile(pipeline, at, problem_of(p, work), work, warp, lane);
}
QG_DEVICE void produce_expert_scales(Pipeline& pipeline, const BlockScaledParams& params, u32 lane) {
    WorkList list = WorkList::of_cta(params.gemm);
    WorkTile work;
    Position at = {};
    while (WorkList::next(list, params.gemm, work)) produce_scales_tile(pipeline, at, problem_of(params, work), work, lane);
}

// Work of the producer warpgroup; `thread` is its thread index.
// The last CTA has the fewest tiles.
// It then validates the index, with `words` in shared memory.
QG_DEVICE void produce(Pipeline& pipeline, const TmaBlockScaledParams& params, u32 thread, u32* words) {
    constexpr u32 THREADS = 128, BARRIER = 4;
    const u32 warp = shfl_idx_u32(thread / 32, 0), lane = thread % 32;
    // The previous launch may write the index, which selects W.
    griddepcontrol_wait();
    if (warp == 0) {
        produce_expert_x(pipeline, params, lane);
    } else if (warp == 1) {
        produce_expert_scales(pipeline, params.x, lane);
    } else {
        produce_expert_w(pipeline, params.x.gemm, warp - 2, lane);
    }
    warp_barrier();
    if (cta_index().x + 1 == grid_ctas().x)
        store_faults<THREADS>(params.x.gemm.groups, words, thread, [] { barrier_sync(BARRIER, THREADS); });
}
#else
QG_DEVICE const BlockScaledParams& problem_of(const BlockScaledParams& params, const WorkTile&) {
    return params;
}
#endif
