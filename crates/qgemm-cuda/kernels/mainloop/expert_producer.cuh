// The producer warpgroup of products with experts. W is copied by TMA. So is X, a whole tile of rows at once, where the rows of an
// expert follow one another; rows of the next expert come along, and nothing depends on them. Where a list says which rows are the
// expert's, which TMA of Hopper cannot follow, every warp copies a quarter of them by `cp.async`, and arrives when these are there:
// matrix instructions of the asynchronous proxy read them, so that a fence stands between.
#pragma once
#include "atoms/cp_async.cuh"
#include "mainloop/tma_pipeline.cuh"
#include "sched/rows.cuh"

#if QG_EXPERT_TILES
constexpr u32 PRODUCER_WARPS = 4;
// Rows that a warp copies of a stage, of which a lane knows one, and those that an instruction copies.
constexpr u32 GATHERED_ROWS = QG_TILE_M / PRODUCER_WARPS, ROWS_AT_ONCE = 32 / X_ROW_CHUNKS;
static_assert(GATHERED_ROWS <= 32 && GATHERED_ROWS % ROWS_AT_ONCE == 0, "a lane knows a row");
// Stages whose copies are in flight while those of the next are issued.
constexpr u32 IN_FLIGHT_STAGES = QG_X_STAGES / 2;
static_assert(IN_FLIGHT_STAGES + 1 <= QG_X_STAGES, "a stage is announced before its place is filled anew");

// Arrivals for a stage: who announces the bytes, and, of rows that are gathered, every warp.
QG_DEVICE u32 stage_producers(const GemmParams& p) {
    return p.groups.list != 0 ? 1 + PRODUCER_WARPS : 1;
}

// The stages that a warp has begun to gather.
struct GatheredStages {
    // Stages begun, and the next that has not been announced.
    u32 begun, announced;

    // For all lanes of a warp, after all but the last LEFT groups of copies are complete.
    template <u32 LEFT>
    QG_DEVICE void announce(GatheredStages& stages, Pipeline& pipeline, u32 lane) {
        cp_async_wait_group<LEFT>();
        fence_proxy_async();
        warp_barrier();
        if (lane == 0) mbarrier_arrive(&pipeline.full[stages.announced]);
        if (++stages.announced == QG_X_STAGES) stages.announced = 0;
        stages.begun--;
    }
};

// The warp's part of the columns from `column` on, 64 of each row. `own_row` is the row of X of each lane's token.
QG_DEVICE void gather_k_block(XStage& stage, const GemmParams& p, u32 own_row, u32 rows, u32 column, u32 warp, u32 lane) {
    const u32 chunk = lane % X_ROW_CHUNKS, first_column = column + chunk * X_CHUNK_K;
    const u32 left = first_column < p.shape.k ? (p.shape.k - first_column) * 2 : 0;
    const u32 bytes = left < X_CHUNK_BYTES ? left : X_CHUNK_BYTES;
    const u8* columns = reinterpret_cast<const u8*>(p.at.x) + (left != 0 ? first_column : 0) * 2;
    // Unrolled as a whole, the loop takes more registers than a producer has.
#pragma unroll 2
    for (u32 i = 0; i < GATHERED_ROWS; i += ROWS_AT_ONCE) {
        const u32 of_warp = i + lane / X_ROW_CHUNKS, token = warp * GATHERED_ROWS + of_warp;
        const u32 row = shfl_idx_u32(own_row, of_warp);
        if (token < rows)
            cp_async_16(shared_address(XStage::at(stage, token, chunk)), columns + row * p.at.x_row * 2, bytes);
    }
}

template <bool GATHERS>
QG_DEVICE void produce_tiles(Pipeline& pipeline, const TmaGemmParams& params, u32 warp, u32 lane) {
    const GemmParams& p = params.gemm;
    const bool leads = warp == 0 && lane == 0;
    const u32 w_tile = lane * W_PRODUCERS + warp - 1;
    const bool copies_w = warp > 0 && w_tile < CTA_ROW_TILES;
    GatheredStages stages = {};
    ProducerWalk walk = ProducerWalk::start(p);
    while (ProducerWalk::next_tile(walk, p)) {
        const GemmParams own = problem_of(p, walk.work);
        const u8* w = row_tile(own, walk.work.n_tile * CTA_ROW_TILES + (copies_w ? w_tile : 0), 0);
        u32 own_row = 0;
        if constexpr (GATHERS) {
            if (lane < GATHERED_ROWS) find_x_row(own, warp * GATHERED_ROWS + lane, own_row);
        }
        u32 column = 0;
#pragma unroll 1
        for (u32 k_tile = 0; k_tile < walk.work.end; k_tile += RUN_K_TILES) {
            const u32 k_tiles = ProducerWalk::k_tiles_of_run(walk, k_tile);
            const u32 k_blocks = RUN_K_TILES > 1 ? k_tiles * K_BLOCKS : STAGE_K_BLOCKS;
#pragma unroll
            for (u32 i = 0; i < K_TILE_STAGES; i++) {
                ProducerWalk::wait_empty(walk, pipeline);
                u64* full = &pipeline.full[walk.at.x];
                const u32 w_bytes = i == 0 ? CTA_ROW_TILES * k_tiles * QG_K_TILE_BYTES : 0;
                if (leads) mbarrier_arrive_expect_tx(full, (GATHERS ? 0 : k_blocks * X_STAGE_BYTES) + w_bytes);
                if (i == 0 && copies_w)
                    cp_async_bulk(pipeline.w[walk.at.w].tile[w_tile], w, k_tiles * QG_K_TILE_BYTES, full);
#pragma unroll
                for (u32 k_block = 0; k_block < STAGE_K_BLOCKS; k_block++, column += K_BLOCK) {
                    if (k_block > 0 && k_block >= k_blocks) continue;
                    XStage& stage = pipeline.x[walk.at.x][k_block];
                    if constexpr (GATHERS)
                        gather_k_block(stage, p, own_row, own.shape.m, column, warp, lane);
                    else if (leads)
                        cp_async_bulk_tensor_2d(stage.bytes, &params.x_map, column, walk.work.own.first, full);
                }
                if constexpr (GATHERS) {
                    cp_async_commit_group();
                    if (++stages.begun > IN_FLIGHT_STAGES)
                        GatheredStages::announce<IN_FLIGHT_STAGES>(stages, pipeline, lane);
                }
                Position::next_stage(walk.at);
            }
            Position::next_run(walk.at);
            w += RUN_K_TILES * QG_K_TILE_BYTES;
        }
    }
    if constexpr (GATHERS) {
        cp_async_wait_group<0>();
        while (stages.begun > 0) GatheredStages::announce<0>(stages, pipeline, lane);
    }
}

// The work of the producer warpgroup; `thread` is the number in it. The last CTA, which has as few tiles as any, then looks for faults
// of the index, with `words` in shared memory.
QG_DEVICE void produce(Pipeline& pipeline, const TmaGemmParams& params, u32 thread, u32* words) {
    constexpr u32 THREADS = PRODUCER_WARPS * 32, BARRIER = 4;
    // The index may come from the launch before, and W is chosen by it.
    griddepcontrol_wait();
    if (params.gemm.groups.list != 0)
        produce_tiles<true>(pipeline, params, thread / 32, thread % 32);
    else
        produce_tiles<false>(pipeline, params, thread / 32, thread % 32);
    if (cta_index().x + 1 == grid_ctas().x)
        store_faults<THREADS>(params.gemm.groups, words, thread, [] { barrier_sync(BARRIER, THREADS); });
}
#endif
