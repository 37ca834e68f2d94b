// Ring of a warp-specialized CTA, Hopper and newer.
// When a stage is free, the producer warpgroup
// refills it by TMA:
// its X columns, and the W k-tiles that begin with it.
// Consumers wait only for data.
#pragma once
#include "atoms/mbarrier.cuh"
#include "atoms/sync.cuh"
#include "atoms/tma.cuh"
#include "atoms/warp.cuh"
#include "mainloop/cache_line.cuh"
#include "mainloop/tma_params.cuh"
#include "mainloop/w_ring.cuh"
#include "mainloop/x_ring.cuh"
#include "sched/tile.cuh"

// A stage is part of a k-tile, or several contiguous k-tiles.
// A k-tile or run arrives with the first stage that needs it.
constexpr u32 STAGE_K_BLOCKS = QG_STAGE_K_BLOCKS;
constexpr u32 K_TILE_STAGES = K_BLOCKS > STAGE_K_BLOCKS ? K_BLOCKS / STAGE_K_BLOCKS : 1;
constexpr u32 RUN_K_TILES = STAGE_K_BLOCKS > K_BLOCKS ? STAGE_K_BLOCKS / K_BLOCKS : 1;
static_assert(K_TILE_STAGES * STAGE_K_BLOCKS == RUN_K_TILES * K_BLOCKS, "runs of k-tiles are whole stages");
// A run is overwritten when the first stage of a later run is
// filled; its last stage is then free.
static_assert(QG_W_STAGES == 1 + (QG_X_STAGES - 1 + K_TILE_STAGES - 1) / K_TILE_STAGES, "runs for all stages of X");

// First thread of the producer warpgroup.
constexpr u32 FIRST_PRODUCER = QG_THREADS - 128;

// Whether runs keep their offset modulo a cache line
// (`mainloop/cache_line.cuh`), if the host leaves room.
// With experts all runs are one copy, without gaps.
constexpr u32 RUN_BYTES = RUN_K_TILES * QG_K_TILE_BYTES;
constexpr bool IN_LINES = QG_RUN_PITCH != RUN_BYTES && !QG_EXPERT_TILES;
static_assert(!IN_LINES || QG_RUN_PITCH >= RUN_BYTES + LINE_BYTES - 16, "a run that begins at any 16 bytes of a line");
static_assert(!IN_LINES || (sizeof(XStage) % LINE_BYTES == 0 && QG_RUN_PITCH % LINE_BYTES == 0), "rings begin with lines");

struct WRuns {
    alignas(16) u8 tile[CTA_ROW_TILES][QG_RUN_PITCH];  // [row tile][byte]

    // `from`: low bits of the run's global address.
    QG_DEVICE u8* run(WRuns& runs, u32 tile, u32 from) {
        return IN_LINES ? runs.tile[tile] + from % LINE_BYTES : runs.tile[tile];
    }
};

struct Pipeline {
    XStage x[QG_X_STAGES][STAGE_K_BLOCKS];  // [stage][k-block]
    WRuns w[QG_W_STAGES];
    u64 full[QG_X_STAGES];
    u64 empty[QG_X_STAGES];

    // The first thread initializes, before a CTA barrier.
    // `producers` arrive for each stage.
    QG_DEVICE void init(Pipeline& pipeline, u32 producers = 1) {
#pragma unroll
        for (u32 i = 0; i < QG_X_STAGES; i++) {
            mbarrier_init(&pipeline.full[i], producers);
            mbarrier_init(&pipeline.empty[i], QG_WARPS_N);
        }
        fence_mbarrier_init();
    }
    // A warp calls it after it has read all of a stage.
    QG_DEVICE void release(Pipeline& pipeline, u32 stage, u32 lane) {
        warp_barrier();
        if (lane == 0) mbarrier_arrive(&pipeline.empty[stage]);
    }
};

// Position in the ring.
struct Position {
    u32 x, w;
    // Number of wraps of the stages, modulo 2.
    u32 parity;

    QG_DEVICE void next_stage(Position& at) {
        if (++at.x == QG_X_STAGES) at.x = 0, at.parity ^= 1;
    }
    QG_DEVICE void next_run(Position& at) {
        if (++at.w == QG_W_STAGES) at.w = 0;
    }
    // Skips COUNT runs of other groups, or all runs of a work tile.
    template <u32 COUNT>
    QG_DEVICE void skip(Position& at) {
        if constexpr (COUNT > 0) {
#pragma unroll
            for (u32 i = 0; i < K_TILE_STAGES; i++) next_stage(at);
            next_run(at);
            skip<COUNT - 1>(at);
        }
    }
    QG_DEVICE void skip_all(Position& at, const WorkTile& work) {
        const u32 runs = (work.end - work.begin + RUN_K_TILES - 1) / RUN_K_TILES;
        const u32 x = at.x + runs * K_TILE_STAGES;
        at.x = x % QG_X_STAGES;
        at.parity ^= x / QG_X_STAGES % 2;
        at.w = (at.w + runs) % QG_W_STAGES;
    }
};

// Warps that copy W; the first warp copies X.
// Lanes issue bulk copies one after another, and each is slow:
// a single warp would delay CTAs with eight row tiles.
constexpr u32 W_PRODUCERS = 3;

// Iteration of a producer warp over the consumers' work.
struct ProducerWalk {
    WorkList list;
    WorkTile work;
    Position at;

    QG_DEVICE ProducerWalk start(const GemmParams& p) { return {WorkList::of_cta(p), {}, {}}; }
    QG_DEVICE bool next_tile(ProducerWalk& walk, const GemmParams& p) {
        return WorkList::next(walk.list, p, walk.work);
    }
    // The phase before the first counts as complete, so a stage
    // that was never filled is empty.
    QG_DEVICE void wait_empty(const ProducerWalk& walk, Pipeline& pipeline) {
        mbarrier_wait(&pipeline.empty[walk.at.x], walk.at.parity ^ 1);
    }
    // K-tiles of the run that starts at `k_tile`.
    QG_DEVICE u32 k_tiles_of_run(const ProducerWalk& walk, u32 k_tile) {
        return walk.work.end - k_tile < RUN_K_TILES ? walk.work.end - k_tile : RUN_K_TILES;
    }
};

#if !QG_EXPERT_TILES
// One lane of the first warp copies X.
// It arrives on the full barrier for all copies.
// Tokens past the last are not copied:
// TMA is slower at zero-fill than at copies, and their
// outputs are ignored.
QG_DEVICE void produce_x(Pipeline& pipeline, const TmaGemmParams& params) {
    const GemmParams& p = params.gemm;
    ProducerWalk walk = ProducerWalk::start(p);
    griddepcontrol_wait();
    while (ProducerWalk::next_tile(walk, p)) {
        const u32 token = walk.work.m_tile * QG_TILE_M;
        const u32 tokens = p.shape.m - token < QG_TILE_M ? p.shape.m - token : QG_TILE_M;
        const TensorMap* map = tokens < QG_TILE_M ? &params.x_tail_map : &params.x_map;
        u32 column = walk.work.begin * QG_K_TILE;
#pragma unroll 1
        for (u32 k_tile = walk.work.begin; k_tile < walk.work.end; k_tile += RUN_K_TILES) {
            const u32 k_tiles = ProducerWalk::k_tiles_of_run(walk, k_tile);
            const u32 k_blocks = RUN_K_TILES > 1 ? k_tiles * K_BLOCKS : STAGE_K_BLOCKS;
#pragma unroll
            for (u32 i = 0; i < K_TILE_STAGES; i++) {
                ProducerWalk::wait_empty(walk, pipeline);
                u64* full = &pipeline.full[walk.at.x];
                const u32 w_bytes = i == 0 ? CTA_ROW_TILES * k_tiles * QG_K_TILE_BYTES : 0;
                mbarrier_arrive_expect_tx(full, k_blocks * tokens * X_ROW_BYTES + w_bytes);
#pragma unroll
                for (u32 k_block = 0; k_block < STAGE_K_BLOCKS; k_block++, column += K_BLOCK)
                    if (k_block == 0 || k_block < k_blocks)
                        cp_async_bulk_tensor_2d(pipeline.x[walk.at.x][k_block].bytes, map, column, token, full);
                Position::next_stage(walk.at);
            }
        }
    }
}

// The other warps copy W. They do not wait for the
// previous kernel.
QG_DEVICE void produce_w(Pipeline& pipeline, const GemmParams& p, u32 warp, u32 lane) {
    const u32 tile = lane * W_PRODUCERS + warp;
    const bool copies = tile < CTA_ROW_TILES;
    ProducerWalk walk = ProducerWalk::start(p);
    while (ProducerWalk::next_tile(walk, p)) {
        const u8* w = row_tile(p, walk.work.n_tile * CTA_ROW_TILES + (copies ? tile : 0), walk.work.begin);
#pragma unroll 1
        for (u32 k_tile = walk.work.begin; k_tile < walk.work.end; k_tile += RUN_K_TILES) {
            const u32 k_tiles = ProducerWalk::k_tiles_of_run(walk, k_tile);
            u64* full = &pipeline.full[walk.at.x];
#pragma unroll
            for (u32 i = 0; i < K_TILE_STAGES; i++) {
                // Stages without W count too: a run is free when
                // all its stages are.
                ProducerWalk::wait_empty(walk, pipeline);
                if (i == 0 && copies)
                    cp_async_bulk(WRuns::run(pipeline.w[walk.at.w], tile, (u32)reinterpret_cast<u64>(w)), w, k_tiles * QG_K_TILE_BYTES, full);
                Position::next_stage(walk.at);
            }
            Position::next_run(walk.at);
            w += RUN_K_TILES * QG_K_TILE_BYTES;
        }
    }
}

// Work of the producer warpgroup; `thread` is its thread index.
QG_DEVICE void produce(Pipeline& pipeline, const TmaGemmParams& params, u32 thread) {
    const u32 warp = thread / 32, lane = thread % 32;
    if (warp > 0)
        produce_w(pipeline, params.gemm, warp - 1, lane);
    else if (lane == 0)
        produce_x(pipeline, params);
}

// Arrivals per stage.
QG_DEVICE u32 stage_producers(const GemmParams&) {
    return 1;
}
#endif
