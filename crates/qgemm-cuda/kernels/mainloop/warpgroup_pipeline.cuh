// The ring of a block that a warpgroup of its own feeds, on Hopper: as soon as a stage is free, the copy engine is asked for
// its columns of X, and for the slabs of W that begin with it. The warpgroups that multiply wait for nothing but data.
#pragma once
#include "atoms/mbarrier.cuh"
#include "atoms/sync.cuh"
#include "atoms/tma.cuh"
#include "atoms/warp.cuh"
#include "mainloop/fed_params.cuh"
#include "mainloop/w_ring.cuh"
#include "mainloop/x_ring.cuh"
#include "sched/tile.cuh"

// Chunks of a stage, and stages of a slab.
constexpr u32 STAGE_CHUNKS = QG_STAGE_CHUNKS;
constexpr u32 SLAB_STAGES = CHUNKS / STAGE_CHUNKS;
static_assert(SLAB_STAGES * STAGE_CHUNKS == CHUNKS, "slabs are whole stages");
// A slab of W is overwritten when the first stage of a later slab is filled: by then its own last stage is done with.
static_assert(QG_W_STAGES == 1 + (QG_X_STAGES - 1 + SLAB_STAGES - 1) / SLAB_STAGES, "slabs for all stages of X");

struct Pipeline {
    XStage x[QG_X_STAGES][STAGE_CHUNKS];
    WStage w[QG_W_STAGES];
    u64 full[QG_X_STAGES];
    u64 empty[QG_X_STAGES];

    // By the first thread, before a block barrier.
    QG_DEVICE void init(Pipeline& pipeline) {
#pragma unroll
        for (u32 i = 0; i < QG_X_STAGES; i++) {
            mbarrier_init(&pipeline.full[i], 1);
            mbarrier_init(&pipeline.empty[i], QG_WARPS_N);
        }
        fence_mbarrier_init();
    }
    // A warp has read all that it wants of a stage.
    QG_DEVICE void release(Pipeline& pipeline, u32 stage, u32 lane) {
        warp_barrier();
        if (lane == 0) mbarrier_arrive(&pipeline.empty[stage]);
    }
};

// A place in the ring.
struct Position {
    u32 x, w;
    // How often the stages have gone round, modulo 2.
    u32 parity;

    QG_DEVICE void next_stage(Position& at) {
        if (++at.x == QG_X_STAGES) at.x = 0, at.parity ^= 1;
    }
    QG_DEVICE void next_slab(Position& at) {
        if (++at.w == QG_W_STAGES) at.w = 0;
    }
    // Past the next slabs, which others multiply: a few, or the tile's.
    template <u32 COUNT>
    QG_DEVICE void skip(Position& at) {
        if constexpr (COUNT > 0) {
#pragma unroll
            for (u32 i = 0; i < SLAB_STAGES; i++) next_stage(at);
            next_slab(at);
            skip<COUNT - 1>(at);
        }
    }
    QG_DEVICE void skip_all(Position& at, u32 slabs) {
        const u32 x = at.x + slabs * SLAB_STAGES;
        at.x = x % QG_X_STAGES;
        at.parity ^= x / QG_X_STAGES % 2;
        at.w = (at.w + slabs) % QG_W_STAGES;
    }
};

// Warps of the feeding warpgroup that copy W; the first copies X. A lane's copy of a slab takes some 60 cycles to issue, one
// lane after another, so that a block with eight tiles of rows waited for one feeding warp (measured on an H200).
constexpr u32 W_FEEDERS = 3;

// What a feeding warp walks through: the block's work, as those that multiply do.
struct FeederWalk {
    WorkList list;
    TileWork work;
    Position at;

    QG_DEVICE FeederWalk start(const GemmParams& p) { return {WorkList::of_block(p), {}, {}}; }
    QG_DEVICE bool next_tile(FeederWalk& walk, const GemmParams& p) { return WorkList::next(walk.list, p, walk.work); }
    // Of a stage that has never been filled, the phase before the first counts as complete.
    QG_DEVICE void wait_empty(const FeederWalk& walk, Pipeline& pipeline) {
        mbarrier_wait(&pipeline.empty[walk.at.x], walk.at.parity ^ 1);
    }
};

// All that one lane of the first feeding warp does. It arrives on a full stage for all copies.
QG_DEVICE void feed_x(Pipeline& pipeline, const FedGemmParams& params) {
    const GemmParams& p = params.gemm;
    FeederWalk walk = FeederWalk::start(p);
    griddepcontrol_wait();
    while (FeederWalk::next_tile(walk, p)) {
        const u32 token = walk.work.m_tile * QG_TILE_M;
        u32 column = walk.work.begin * QG_SLAB_K;
#pragma unroll 1
        for (u32 slab = walk.work.begin; slab < walk.work.end; slab++) {
#pragma unroll
            for (u32 i = 0; i < SLAB_STAGES; i++) {
                FeederWalk::wait_empty(walk, pipeline);
                u64* full = &pipeline.full[walk.at.x];
                const u32 w_bytes = i == 0 ? BLOCK_ROW_TILES * QG_SLAB_BYTES : 0;
                mbarrier_arrive_expect_tx(full, STAGE_CHUNKS * X_STAGE_BYTES + w_bytes);
#pragma unroll
                for (u32 chunk = 0; chunk < STAGE_CHUNKS; chunk++, column += CHUNK_K)
                    cp_async_bulk_tensor_2d(pipeline.x[walk.at.x][chunk].bytes, &params.x_map, column, token, full);
                Position::next_stage(walk.at);
            }
        }
    }
}

// All that the other feeding warps do; they need not wait for the kernel before this one.
QG_DEVICE void feed_w(Pipeline& pipeline, const GemmParams& p, u32 warp, u32 lane) {
    const u32 tile = lane * W_FEEDERS + warp;
    const bool copies = tile < BLOCK_ROW_TILES;
    FeederWalk walk = FeederWalk::start(p);
    while (FeederWalk::next_tile(walk, p)) {
        const u8* w = row_tile(p, walk.work.n_tile * BLOCK_ROW_TILES + (copies ? tile : 0), walk.work.begin);
#pragma unroll 1
        for (u32 slab = walk.work.begin; slab < walk.work.end; slab++) {
            u64* full = &pipeline.full[walk.at.x];
#pragma unroll
            for (u32 i = 0; i < SLAB_STAGES; i++) {
                // Also for stages that bring no W: the slab before in its place is done with when all are free in turn.
                FeederWalk::wait_empty(walk, pipeline);
                if (i == 0 && copies) cp_async_bulk(pipeline.w[walk.at.w].slab[tile], w, QG_SLAB_BYTES, full);
                Position::next_stage(walk.at);
            }
            Position::next_slab(walk.at);
            w += QG_SLAB_BYTES;
        }
    }
}
