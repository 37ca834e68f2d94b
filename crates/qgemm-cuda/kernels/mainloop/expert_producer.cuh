// The producer warpgroup of products with experts. W is copied by TMA. So is X, a whole tile of rows at once, where the rows of an
// expert follow one another; rows of the next expert come along, and nothing depends on them. Where a list says which rows are the
// expert's, which TMA of Hopper cannot follow, a warp copies those of every fourth stage by `cp.async`, and arrives when these are
// there: matrix instructions of the asynchronous proxy read them, so that a fence stands between.
#pragma once
#include "atoms/cp_async.cuh"
#include "mainloop/tma_pipeline.cuh"
#include "sched/rows.cuh"

#if QG_EXPERT_TILES
constexpr u32 PRODUCER_WARPS = 4;
// Rows that a lane knows, and those that an instruction copies.
constexpr u32 LANE_X_ROWS = (QG_TILE_M + 31) / 32, ROWS_AT_ONCE = 32 / X_ROW_CHUNKS;
static_assert(QG_TILE_M % ROWS_AT_ONCE == 0, "instructions copy whole rows");
static_assert(CTA_ROW_TILES <= 32, "a lane copies a row tile of W");

// Arrivals for a stage: who announces the bytes, and, of rows that are gathered, the warp that has copied them.
QG_DEVICE u32 stage_producers(const GemmParams& p) {
    return p.groups.list != 0 ? 2 : 1;
}

// Columns from `column` on, 64 of each row. `own_row` is the row of X of tokens `lane`, `lane + 32`, ….
QG_DEVICE void gather_k_block(XStage& stage, const GemmParams& p, const u32 (&own_row)[LANE_X_ROWS], u32 rows, u32 column, u32 lane) {
    const u32 chunk = lane % X_ROW_CHUNKS, first_column = column + chunk * X_CHUNK_K;
    const u32 left = first_column < p.shape.k ? (p.shape.k - first_column) * 2 : 0;
    const u32 bytes = left < X_CHUNK_BYTES ? left : X_CHUNK_BYTES;
    const u8* columns = reinterpret_cast<const u8*>(p.at.x) + (left != 0 ? first_column : 0) * 2;
#pragma unroll
    for (u32 part = 0; part < LANE_X_ROWS; part++) {
        const u32 until = rows < part * 32 ? 0 : rows - part * 32 < 32 ? rows - part * 32 : 32;
        // Unrolled as a whole, the loop takes more registers than a producer has.
#pragma unroll 2
        for (u32 i = 0; i < until; i += ROWS_AT_ONCE) {
            const u32 of_part = i + lane / X_ROW_CHUNKS, row = shfl_idx_u32(own_row[part], of_part);
            if (of_part < until)
                cp_async_16(shared_address(XStage::at(stage, part * 32 + of_part, chunk)), columns + row * p.at.x_row * 2, bytes);
        }
    }
}

// Rows by a list. A warp copies every fourth stage, W with it, and waits for that one alone: the fence waits for all that a warp has
// begun to copy.
QG_DEVICE void gather_tiles(Pipeline& pipeline, const GemmParams& p, u32 warp, u32 lane) {
    // Stages until the warp's next one.
    u32 until_own = warp;
    ProducerWalk walk = ProducerWalk::start(p);
    while (ProducerWalk::next_tile(walk, p)) {
        const GemmParams own = problem_of(p, walk.work);
        const u8* w = row_tile(own, walk.work.n_tile * CTA_ROW_TILES + (lane < CTA_ROW_TILES ? lane : 0), 0);
        u32 own_row[LANE_X_ROWS] = {};
#pragma unroll
        for (u32 part = 0; part < LANE_X_ROWS; part++) {
            if (part * 32 + lane < QG_TILE_M) find_x_row(own, part * 32 + lane, own_row[part]);
        }
        u32 column = 0;
#pragma unroll 1
        for (u32 k_tile = 0; k_tile < walk.work.end; k_tile += RUN_K_TILES) {
            const u32 k_tiles = ProducerWalk::k_tiles_of_run(walk, k_tile);
            const u32 k_blocks = RUN_K_TILES > 1 ? k_tiles * K_BLOCKS : STAGE_K_BLOCKS;
#pragma unroll 1
            for (u32 i = 0; i < K_TILE_STAGES; i++, column += STAGE_K_BLOCKS * K_BLOCK) {
                ProducerWalk::wait_empty(walk, pipeline);
                if (until_own == 0) {
                    u64* full = &pipeline.full[walk.at.x];
                    if (lane == 0) mbarrier_arrive_expect_tx(full, i == 0 ? CTA_ROW_TILES * k_tiles * QG_K_TILE_BYTES : 0);
                    if (i == 0 && lane < CTA_ROW_TILES)
                        cp_async_bulk(pipeline.w[walk.at.w].tile[lane], w, k_tiles * QG_K_TILE_BYTES, full);
#pragma unroll 1
                    for (u32 k_block = 0; k_block < STAGE_K_BLOCKS && (k_block == 0 || k_block < k_blocks); k_block++)
                        gather_k_block(pipeline.x[walk.at.x][k_block], p, own_row, own.shape.m, column + k_block * K_BLOCK, lane);
                    cp_async_commit_group();
                    cp_async_wait_group<0>();
                    fence_proxy_async();
                    warp_barrier();
                    if (lane == 0) mbarrier_arrive(full);
                    until_own = PRODUCER_WARPS;
                }
                until_own--;
                Position::next_stage(walk.at);
            }
            Position::next_run(walk.at);
            w += RUN_K_TILES * QG_K_TILE_BYTES;
        }
    }
}

// Rows that follow one another.
QG_DEVICE void copy_tiles(Pipeline& pipeline, const TmaGemmParams& params, u32 warp, u32 lane) {
    const GemmParams& p = params.gemm;
    const bool leads = warp == 0 && lane == 0;
    const u32 w_tile = lane * W_PRODUCERS + warp - 1;
    const bool copies_w = warp > 0 && w_tile < CTA_ROW_TILES;
    ProducerWalk walk = ProducerWalk::start(p);
    while (ProducerWalk::next_tile(walk, p)) {
        const GemmParams own = problem_of(p, walk.work);
        const u8* w = row_tile(own, walk.work.n_tile * CTA_ROW_TILES + (copies_w ? w_tile : 0), 0);
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
                if (leads) mbarrier_arrive_expect_tx(full, k_blocks * X_STAGE_BYTES + w_bytes);
                if (i == 0 && copies_w)
                    cp_async_bulk(pipeline.w[walk.at.w].tile[w_tile], w, k_tiles * QG_K_TILE_BYTES, full);
#pragma unroll
                for (u32 k_block = 0; k_block < STAGE_K_BLOCKS; k_block++, column += K_BLOCK) {
                    if (k_block > 0 && k_block >= k_blocks) continue;
                    if (leads)
                        cp_async_bulk_tensor_2d(pipeline.x[walk.at.x][k_block].bytes, &params.x_map, column,
                                                walk.work.own.first, full);
                }
                Position::next_stage(walk.at);
            }
            Position::next_run(walk.at);
            w += RUN_K_TILES * QG_K_TILE_BYTES;
        }
    }
}

// The work of the producer warpgroup; `thread` is the number in it. The last CTA, which has as few tiles as any, then looks for faults
// of the index, with `words` in shared memory.
QG_DEVICE void produce(Pipeline& pipeline, const TmaGemmParams& params, u32 thread, u32* words) {
    constexpr u32 THREADS = PRODUCER_WARPS * 32, BARRIER = 4;
    // The index may come from the launch before, and W is chosen by it.
    griddepcontrol_wait();
    if (params.gemm.groups.list != 0)
        gather_tiles(pipeline, params.gemm, thread / 32, thread % 32);
    else
        copy_tiles(pipeline, params, thread / 32, thread % 32);
    if (cta_index().x + 1 == grid_ctas().x)
        store_faults<THREADS>(params.gemm.groups, words, thread, [] { barrier_sync(BARRIER, THREADS); });
}
#endif
