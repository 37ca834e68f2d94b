// Producer warpgroup of MoE GEMM.
// TMA copies W, one k-tile of all row tiles at a time.
// If an expert's rows are contiguous, TMA copies
// a tile of X too.
// Rows of the next expert may come along; they are ignored.
// If a list names the rows, Hopper's TMA cannot gather them:
// each warp copies a quarter by `cp.async`, and every thread's
// completion arrives on the stage's mbarrier.
// wgmma reads these bytes through the async proxy, so
// consumers fence after the wait.
#pragma once
#include "atoms/cp_async.cuh"
#include "atoms/tma_tensor5.cuh"
#include "mainloop/tma_pipeline.cuh"
#include "sched/rows.cuh"
#include "sched/tile_info.cuh"

#if QG_EXPERT_TILES
#include "atoms/tma_stream5.cuh"
#include "sched/early_experts.cuh"

constexpr u32 PRODUCER_WARPS = 4;
// Rows of a stage that a warp copies, and rows per instruction.
constexpr u32 GATHERED_ROWS = QG_TILE_M / PRODUCER_WARPS, ROWS_AT_ONCE = 32 / X_ROW_CHUNKS;
static_assert(GATHERED_ROWS % ROWS_AT_ONCE == 0, "instructions copy whole groups of rows");

// Arrivals per stage: the thread that announces the bytes,
// plus every thread if rows are gathered.
QG_DEVICE u32 stage_producers(const GemmParams& p) {
    return p.groups.list != 0 ? 1 + PRODUCER_WARPS * 32 : 1;
}

// The rows that a warp gathers.
// A lane copies a chunk of one of ROWS_AT_ONCE rows at a time.
struct GatheredRows {
    static constexpr u32 COUNT = GATHERED_ROWS / ROWS_AT_ONCE;
    // Byte offsets of the lane's chunks in X.
    // Rows past the tile's last repeat the warp's first row.
    u32 from[COUNT];
    // Offsets of the lane's first two chunks in a stage.
    // Rows eight further have the same swizzle.
    u32 to[2];
    // Whether the warp has any row of the tile.
    bool any;

    // Looks up the rows of a tile of `own` in the list.
    QG_DEVICE void find(GatheredRows& rows, const GemmParams& own, u32 warp, u32 lane) {
        const u32 first = warp * GATHERED_ROWS, chunk = lane % X_ROW_CHUNKS;
        // Row offsets that this lane looks up, one of every 32.
        u32 begin[(GATHERED_ROWS + 31) / 32];
#pragma unroll
        for (u32 i = 0; i < (GATHERED_ROWS + 31) / 32; i++) {
            const u32 token = i * 32 + lane;
            u32 row = 0;
            if (token < GATHERED_ROWS) find_x_row(own, first + token < own.shape.m ? first + token : first, row);
            begin[i] = row * (u32)own.at.x_row * 2;
        }
#pragma unroll
        for (u32 i = 0; i < COUNT; i++) {
            const u32 token = i * ROWS_AT_ONCE;
            rows.from[i] = shfl_idx_u32(begin[token / 32], token % 32 + lane / X_ROW_CHUNKS) + chunk * X_CHUNK_BYTES;
        }
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
            const u32 token = first + i * ROWS_AT_ONCE + lane / X_ROW_CHUNKS;
            rows.to[i] = token * X_ROW_BYTES + (chunk ^ token % 8) * X_CHUNK_BYTES;
        }
        rows.any = first < own.shape.m;
    }

    // Copies the warp's part of a stage from `column` on, 64
    // columns of each row per k-block.
    QG_DEVICE void copy(const GatheredRows& rows, XStage (&stage)[STAGE_K_BLOCKS], const GemmParams& p, u32 column, u32 lane) {
        if (!rows.any) return;
        const u8* const x = reinterpret_cast<const u8*>(p.at.x) + column * 2;
        const u32 to = shared_address(stage[0].bytes);
        if (column + STAGE_K_BLOCKS * K_BLOCK <= p.shape.k) {
#pragma unroll
            for (u32 i = 0; i < COUNT; i++) {
                const u8* const from = x + rows.from[i];
#pragma unroll
                for (u32 k_block = 0; k_block < STAGE_K_BLOCKS; k_block++)
                    cp_async_16(to + rows.to[i % 2] + i / 2 * 8 * X_ROW_BYTES + k_block * sizeof(XStage), from + k_block * K_BLOCK * 2);
            }
            return;
        }
        // The last columns; zero past K.
#pragma unroll
        for (u32 k_block = 0; k_block < STAGE_K_BLOCKS; k_block++) {
            const u32 first = column + k_block * K_BLOCK + lane % X_ROW_CHUNKS * X_CHUNK_K;
            const u32 own = first < p.shape.k ? (p.shape.k - first) * 2 : 0;
            const u32 bytes = own < X_CHUNK_BYTES ? own : X_CHUNK_BYTES;
#pragma unroll
            for (u32 i = 0; i < COUNT; i++) {
                const u8* const from = bytes == 0 ? reinterpret_cast<const u8*>(p.at.x) : x + k_block * K_BLOCK * 2 + rows.from[i];
                cp_async_16(to + rows.to[i % 2] + i / 2 * 8 * X_ROW_BYTES + k_block * sizeof(XStage), from, bytes);
            }
        }
    }
};
static_assert(ROWS_AT_ONCE == 4, "every second group of rows has the same swizzle");

// Tile info slots: as many as can be unread at a time.
// Tiles of one stage each may fill the ring while consumers
// store the tile before. The producer also writes a slot
// before the tile's first stage is free.
constexpr u32 INFOS = QG_X_STAGES + 2;

QG_DEVICE u32 next_info(u32 info) {
    return info + 1 == INFOS ? 0 : info + 1;
}

// Whether most experts have a single row tile,
// so W is read once.
QG_DEVICE bool reads_w_once(const ExpertGroups& g) {
    return g.form == QG_FORM_MASKED ? g.rows <= TILE_ROWS : g.rows <= (u64)g.experts * TILE_ROWS;
}

// Starts the copy of a W run to the current stage.
// Data that is read once is evicted first from L2.
// X, the index and the outputs then stay.
QG_DEVICE void copy_w(Pipeline& pipeline, const TmaGemmParams& params, const ProducerWalk& walk, u32 k_tile) {
    // Experts may share one weight.
    // K-tiles and row tiles past the end are zero-filled.
    const i32 expert = params.gemm.groups.row_pitch == 0 ? 0 : walk.work.own.expert;
    const i32 at[5] = {0, 0, (i32)k_tile, (i32)(walk.work.n_tile * CTA_ROW_TILES), expert};
    u8* const to = pipeline.w[walk.at.w].tile[0];
    u64* const full = &pipeline.full[walk.at.x];
    if (reads_w_once(params.gemm.groups))
        cp_async_bulk_tensor_5d_stream(to, &params.w_map, at, full, l2_evict_first());
    else
        cp_async_bulk_tensor_5d(to, &params.w_map, at, full);
}

// `infos` is null if consumers find their tiles themselves.
template <bool GATHERS>
QG_DEVICE void produce_tiles(Pipeline& pipeline, const TmaGemmParams& params, TileInfo* infos, u32 warp, u32 lane) {
    const GemmParams& p = params.gemm;
    const bool leads = warp == 0 && lane == 0;
    ProducerWalk walk = ProducerWalk::start(p);
    u32 info = 0;
    bool is_first = true;
    while (ProducerWalk::next_tile(walk, p)) {
        // The first copy of W starts before the row lookup, because no
        // other copy is in flight yet.
        if (is_first && leads) copy_w(pipeline, params, walk, 0);
        const GemmParams own = problem_of(p, walk.work);
        if (infos != nullptr && warp == 0) TileInfo::write(infos[info], own, walk.work, lane);
        info = next_info(info);
        GatheredRows rows;
        if constexpr (GATHERS) GatheredRows::find(rows, own, warp, lane);
        // The previous launch writes X.
        if (is_first) griddepcontrol_wait();
        u32 column = 0;
#pragma unroll 1
        for (u32 k_tile = 0; k_tile < walk.work.end; k_tile += RUN_K_TILES) {
            const u32 k_tiles = ProducerWalk::k_tiles_of_run(walk, k_tile);
            const u32 k_blocks = RUN_K_TILES > 1 ? k_tiles * K_BLOCKS : STAGE_K_BLOCKS;
#pragma unroll
            for (u32 i = 0; i < K_TILE_STAGES; i++) {
                ProducerWalk::wait_empty(walk, pipeline);
                u64* full = &pipeline.full[walk.at.x];
                if (leads) {
                    const u32 w_bytes = i == 0 ? sizeof(WRuns) : 0;
                    mbarrier_arrive_expect_tx(full, (GATHERS ? 0 : k_blocks * X_STAGE_BYTES) + w_bytes);
                    if (i == 0 && !is_first) copy_w(pipeline, params, walk, k_tile);
                }
                is_first = false;
                if constexpr (GATHERS) {
                    GatheredRows::copy(rows, pipeline.x[walk.at.x], p, column, lane);
                } else if (leads) {
#pragma unroll
                    for (u32 k_block = 0; k_block < STAGE_K_BLOCKS; k_block++)
                        if (k_block == 0 || k_block < k_blocks)
                            cp_async_bulk_tensor_2d(pipeline.x[walk.at.x][k_block].bytes, &params.x_map, column + k_block * K_BLOCK,
                                                    walk.work.own.first, full);
                }
                column += STAGE_K_BLOCKS * K_BLOCK;
                if constexpr (GATHERS) cp_async_mbarrier_arrive(full);
                Position::next_stage(walk.at);
            }
            Position::next_run(walk.at);
        }
    }
    if (infos == nullptr) return;
    // An empty stage marks the end.
    ProducerWalk::wait_empty(walk, pipeline);
    u64* full = &pipeline.full[walk.at.x];
    if (warp == 0) TileInfo::write_end(infos[info], lane);
    if (leads) mbarrier_arrive_expect_tx(full, 0);
    if constexpr (GATHERS) cp_async_mbarrier_arrive(full);
}

// Work of the producer warpgroup; `thread` is its thread index.
// The last CTA has the fewest tiles. It then validates the
// index, with `words` in shared memory.
QG_DEVICE void produce(Pipeline& pipeline, const TmaGemmParams& params, u32 thread, u32* words, TileInfo* infos = nullptr) {
    constexpr u32 THREADS = PRODUCER_WARPS * 32, BARRIER = 4;
    // The previous launch may write the index, which selects W.
    // If the index is ready before launch, L1 may still be stale.
    if (params.gemm.shape.flags & INDEX_READY)
        fence_gpu();
    else
        griddepcontrol_wait();
    // The shuffle makes the ring position uniform for the compiler.
    const u32 warp = shfl_idx_u32(thread / 32, 0);
    if (params.gemm.groups.list != 0)
        produce_tiles<true>(pipeline, params, infos, warp, thread % 32);
    else
        produce_tiles<false>(pipeline, params, infos, warp, thread % 32);
    // A CTA without tiles has not waited yet.
    griddepcontrol_wait();
    if (cta_index().x + 1 == grid_ctas().x)
        store_faults<THREADS, 16>(params.gemm.groups, words, thread, [] { barrier_sync(BARRIER, THREADS); });
}
#endif
