// Ring of block-scaled GEMM.
// A stage has 64 bytes of each row of X:
// 64 columns of E4M3, or 128 of FP4.
// One producer thread copies X by TMA.
// Two warps copy packed k-tiles of W, one warp copies
// the scales of X.
#pragma once
#include "atoms/cp_async.cuh"
#include "atoms/mbarrier.cuh"
#include "atoms/sync.cuh"
#include "atoms/tma.cuh"
#include "atoms/warp.cuh"
#include "mainloop/ring.cuh"
#include "mainloop/sm120/block_scaled_params.cuh"
#include "sched/tile.cuh"

// Bytes per row and stage, bytes per instruction, and
// instructions per stage.
constexpr u32 X_STAGE_BYTES = 64, STEP_BYTES = 32, STEPS = X_STAGE_BYTES / STEP_BYTES;
constexpr u32 STAGE_K = X_STAGE_BYTES * 8 / QG_X_BITS;
constexpr u32 STAGE_K_TILES = STAGE_K / QG_K_TILE;
static_assert(QG_K_TILE == 64 && QG_TILE_ROWS == 16, "a stage is whole k-tiles");
// Row tiles of the CTA, and bytes of a row tile per stage.
constexpr u32 CTA_ROW_TILES = QG_TILE_N / QG_TILE_ROWS;
constexpr u32 W_STAGE_BYTES = STAGE_K_TILES * QG_K_TILE_BYTES;

// Scales of a token are loaded as words.
// With 64 columns a stage and 32 per scale, two stages share a
// word, and each uses half of it.
constexpr u32 WORD_K = 4 * QG_SUB_BLOCK;
constexpr u32 SCALE_WORDS = STAGE_K < WORD_K ? 1 : STAGE_K / WORD_K;
// Stages per word of scales.
constexpr u32 WORD_STAGES = STAGE_K < WORD_K ? WORD_K / STAGE_K : 1;

// First thread of the producer warpgroup.
constexpr u32 FIRST_PRODUCER = QG_CONSUMERS;
static_assert(QG_CONSUMERS % 128 == 0 && QG_THREADS == QG_CONSUMERS + 128, "registers pass between whole warpgroups");
// Warps that copy W. Lanes issue bulk copies one after
// another, and each issue is slow.
constexpr u32 W_PRODUCERS = 2;
// Arrivals per stage: the thread that copies X, and the lanes
// that copy scales.
constexpr u32 FILLING = 1 + 32;

struct Pipeline {
    // TMA's swizzle depends on the address.
    // Stages are 512-byte aligned, so X is first in shared memory.
    alignas(16) u8 x[QG_STAGES][QG_TILE_M * X_STAGE_BYTES];  // [stage][token][byte]
    alignas(16) u8 w[QG_STAGES][CTA_ROW_TILES][W_STAGE_BYTES];  // [stage][row tile][byte]
    alignas(16) u32 x_scale[QG_STAGES][SCALE_WORDS][QG_TILE_M];  // [stage][word][token]
    u64 full[QG_STAGES];
    u64 empty[QG_STAGES];

    // The first thread initializes, before a CTA barrier.
    QG_DEVICE void init(Pipeline& pipeline) { init_ring(pipeline.full, pipeline.empty, FILLING, QG_CONSUMERS / 32); }
    // A warp calls it after it has read all of a stage.
    QG_DEVICE void release(Pipeline& pipeline, u32 stage, u32 lane) {
        warp_barrier();
        if (lane == 0) mbarrier_arrive(&pipeline.empty[stage]);
    }
};
static_assert(QG_TILE_M * X_STAGE_BYTES % 512 == 0, "stages of X have the alignment of the swizzle");

using Position = RingPosition<QG_STAGES>;

// The thread that copies X; it arrives on full
// barriers for X and W.
// Tokens past the last are not copied: their
// outputs are ignored.
QG_DEVICE void produce_x(Pipeline& pipeline, const TmaBlockScaledParams& params) {
    const GemmParams& p = params.x.gemm;
    WorkList list = WorkList::of_cta(p);
    WorkTile work;
    Position at = {};
    griddepcontrol_wait();
    while (WorkList::next(list, p, work)) {
        const u32 token = work.m_tile * QG_TILE_M, left = p.shape.m - token;
        const u32 tokens = left < QG_TILE_M ? left : QG_TILE_M;
        const TensorMap* map = tokens < QG_TILE_M ? &params.x_tail_map : &params.x_map;
#pragma unroll 1
        for (u32 k = work.begin; k < work.end; k++) {
            Position::wait_empty(at, pipeline.empty);
            u64* full = &pipeline.full[at.stage];
            mbarrier_arrive_expect_tx(full, tokens * X_STAGE_BYTES + CTA_ROW_TILES * W_STAGE_BYTES);
            cp_async_bulk_tensor_2d(pipeline.x[at.stage], map, (i32)(k * X_STAGE_BYTES), (i32)token, full);
            Position::next(at);
        }
    }
}

// Copies W of a work tile, one warp's share.
// Row tiles past the last repeat the last.
// A k-tile past the last repeats one too: X is zero there, and
// a non-finite value of the copy is in the row anyway.
QG_DEVICE void produce_w_tile(Pipeline& pipeline, Position& at, const GemmParams& p, const WorkTile& work, u32 warp, u32 lane) {
    constexpr u32 SHARE = CTA_ROW_TILES / W_PRODUCERS;
    static_assert(SHARE * W_PRODUCERS == CTA_ROW_TILES && SHARE <= 32, "a lane copies a row tile");
    const u32 own = warp * SHARE + lane;
    const u32 k_tiles = (p.shape.stored_k + QG_K_TILE - 1) / QG_K_TILE;
    const u32 last = (p.shape.stored_rows + QG_TILE_ROWS - 1) / QG_TILE_ROWS - 1;
    const u32 tile = work.n_tile * CTA_ROW_TILES + own;
    const u8* w = reinterpret_cast<const u8*>(p.at.w) + (u64)(tile < last ? tile : last) * k_tiles * QG_K_TILE_BYTES;
#pragma unroll 1
    for (u32 k = work.begin; k < work.end; k++) {
        Position::wait_empty(at, pipeline.empty);
        if (lane < SHARE) {
            const u32 k_tile = k * STAGE_K_TILES;
            const u8* from = w + (u64)k_tile * QG_K_TILE_BYTES;
            u8* to = pipeline.w[at.stage][own];
            u64* full = &pipeline.full[at.stage];
            if (STAGE_K_TILES == 1 || k_tile + STAGE_K_TILES <= k_tiles) {
                cp_async_bulk(to, from, W_STAGE_BYTES, full);
            } else {
                cp_async_bulk(to, from, QG_K_TILE_BYTES, full);
                cp_async_bulk(to + QG_K_TILE_BYTES, from, QG_K_TILE_BYTES, full);
            }
        }
        Position::next(at);
    }
}

// A warp that copies W; independent of the previous kernel.
QG_DEVICE void produce_w(Pipeline& pipeline, const GemmParams& p, u32 warp, u32 lane) {
    WorkList list = WorkList::of_cta(p);
    WorkTile work;
    Position at = {};
    while (WorkList::next(list, p, work)) produce_w_tile(pipeline, at, p, work, warp, lane);
}

// Copies the scales of X of a work tile.
// Scales of missing tokens and of blocks past K are zero.
QG_DEVICE void produce_scales_tile(Pipeline& pipeline, Position& at, const BlockScaledParams& params, const WorkTile& work, u32 lane) {
    const GemmParams& p = params.gemm;
    const u32 blocks = (p.shape.k + QG_SUB_BLOCK - 1) / QG_SUB_BLOCK;
    const u32 first_token = work.m_tile * QG_TILE_M;
#pragma unroll 1
    for (u32 k = work.begin; k < work.end; k++) {
        Position::wait_empty(at, pipeline.empty);
#pragma unroll
        for (u32 word = 0; word < SCALE_WORDS; word++) {
            const u32 block = (k / WORD_STAGES * SCALE_WORDS + word) * 4;
            const u32 left = block < blocks ? blocks - block : 0;
#pragma unroll
            for (u32 i = lane; i < QG_TILE_M; i += 32) {
                const u32 token = first_token + i;
                const u32 bytes = token >= p.shape.m ? 0 : left < 4 ? left : 4;
                const u8* scales = reinterpret_cast<const u8*>(params.x_scales);
                if (bytes > 0) scales += token * params.x_scale_row + block;
                cp_async_4(reinterpret_cast<u8*>(&pipeline.x_scale[at.stage][word][i]), scales, bytes);
            }
        }
        cp_async_mbarrier_arrive(&pipeline.full[at.stage]);
        Position::next(at);
    }
}

// The warp that copies scales of X.
QG_DEVICE void produce_scales(Pipeline& pipeline, const BlockScaledParams& params, u32 lane) {
    const GemmParams& p = params.gemm;
    WorkList list = WorkList::of_cta(p);
    WorkTile work;
    Position at = {};
    griddepcontrol_wait();
    while (WorkList::next(list, p, work)) produce_scales_tile(pipeline, at, params, work, lane);
}

// Work of the producer warpgroup; `thread` is its thread index.
QG_DEVICE void produce(Pipeline& pipeline, const TmaBlockScaledParams& params, u32 thread) {
    const u32 warp = thread / 32, lane = thread % 32;
    if (warp == 0) {
        if (lane == 0) produce_x(pipeline, params);
    } else if (warp == 1) {
        produce_scales(pipeline, params.x, lane);
    } else {
        produce_w(pipeline, params.x.gemm, warp - 2, lane);
    }
}
