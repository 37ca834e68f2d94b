// Ring of W4A8 GEMM: 128 columns a stage, all tokens and rows.
// Consumers decode W to bytes and multiply by codes of X.
// One producer thread copies X by TMA, two warps copy packed W.
// One warp copies the scales of X, or sums its codes.
// With experts one warp copies X and W by TMA.
// The file included before defines the decoding of W.
#pragma once
#include "atoms/cp_async.cuh"
#include "atoms/mbarrier.cuh"
#include "atoms/numeric.cuh"
#include "atoms/opaque_register.cuh"
#include "atoms/sync.cuh"
#include "atoms/tma.cuh"
#include "atoms/warp.cuh"
#include "mainloop/ring.cuh"
#include "mainloop/tma_params.cuh"
#include "mainloop/w_ring.cuh"
#include "sched/tile.cuh"
#if QG_EXPERT_TILES
#include "atoms/tma_tensor5.cuh"
#include "mainloop/sm90/work_tile_info.cuh"
#endif

struct W4A8Params {
    GemmParams gemm;
    XPlanePointers x;
#if QG_EXPERT_TILES
    // X codes: [tokens][columns], 128-byte swizzle.
    // Boxes have 128 columns and a token tile.
    // W map: packed k-tiles, boxes of a stage.
    // Its dimensions are bytes (two), k-tiles, row tiles, experts.
    TensorMap x_map, w_map;
#else
    // X codes: [tokens][columns], 128-byte swizzle.
    // Boxes have 128 columns and a whole token tile.
    // The tail map has the size of a partial last token tile.
    TensorMap x_map, x_tail_map;
#endif
};

// Columns of a stage, which share a scale of X.
// The schedule's k-tiles are stages.
constexpr u32 STAGE_K = 128, STAGE_K_TILES = STAGE_K / QG_K_TILE;
static_assert(STAGE_K_TILES * QG_K_TILE == STAGE_K, "a stage is whole k-tiles");

// First thread of the producer warpgroup.
constexpr u32 FIRST_PRODUCER = QG_THREADS - 128;
// Warps that copy W. Lanes issue bulk copies one after
// another, and each issue is slow.
constexpr u32 W_PRODUCERS = 2;
// Whether a producer sums the codes of a stage for all
// consumers, if zero points need these sums.
constexpr bool SUMS_OF_X = QG_SUMS_OF_X;
static_assert(!SUMS_OF_X || (!QG_X_BLOCK_SCALES && STAGE_K_TILES == 1), "sums take the place of scales, once a stage");
// Arrivals per stage: the X thread, and the lanes
// that copy scales.
// READING counts the warps that read a stage.
constexpr u32 FILLING = 1 + (QG_X_BLOCK_SCALES ? 32 : 0), READING = QG_CONSUMERS / 32 + SUMS_OF_X;

struct Pipeline {
    // TMA's swizzle depends on the address:
    // stages are 1024-byte aligned.
    alignas(16) u8 x[QG_STAGES][QG_TILE_M * STAGE_K];  // [stage][token][column]
    u8 w[QG_STAGES][CTA_ROW_TILES][STAGE_K_TILES * QG_K_TILE_BYTES];  // [stage][row tile][k-tile]
    // Per token: a float scale, or the integer sum of its codes.
    u32 of_tokens[QG_STAGES][QG_X_BLOCK_SCALES || SUMS_OF_X ? QG_TILE_M : 4];  // [stage][token]
    u64 full[QG_STAGES];
    u64 empty[QG_STAGES];
    // The sums of a stage are ready.
    u64 added[SUMS_OF_X ? QG_STAGES : 1];

    // The first thread initializes, before a CTA barrier.
    QG_DEVICE void init(Pipeline& pipeline) {
#pragma unroll
        for (u32 i = 0; SUMS_OF_X && i < QG_STAGES; i++) mbarrier_init(&pipeline.added[i], 1);
        init_ring(pipeline.full, pipeline.empty, FILLING, READING);
    }
    // A warp calls it after it has read all of a stage.
    QG_DEVICE void release(Pipeline& pipeline, u32 stage, u32 lane) {
        warp_barrier();
        if (lane == 0) mbarrier_arrive(&pipeline.empty[stage]);
    }
};

using Position = RingPosition<QG_STAGES>;

// X rows of a work tile: the first row, and the rows from
// there to the end of the product or expert.
struct TileRows {
    u32 first, count;

    QG_DEVICE TileRows of(const GemmParams& p, const WorkTile& work) {
#if QG_EXPERT_TILES
        return {work.own.first, work.own.rows};
#else
        return {work.m_tile * QG_TILE_M, p.shape.m - work.m_tile * QG_TILE_M};
#endif
    }
};

#if QG_EXPERT_TILES
// The warp that copies X and W by TMA and publishes tile info.
// A copy has a whole tile of rows; rows of the next expert may
// come along and are ignored.
// All lanes iterate over the tiles, because the tile search
// works on a whole warp.
QG_DEVICE void produce_x_and_w(Pipeline& pipeline, const W4A8Params& params, WorkTileInfoRing& infos, u32 lane) {
    WorkList list = WorkList::of_cta(params.gemm);
    WorkTile work;
    Position at = {};
    u32 info = 0;
    while (WorkList::next(list, params.gemm, work)) {
        Position::wait_empty(at, pipeline.empty);
        if (lane == 0) WorkTileInfo::write(infos.info[info], work);
        info = WorkTileInfoRing::next(info);
#pragma unroll 1
        for (u32 k = work.begin; k < work.end; k++) {
            Position::wait_empty(at, pipeline.empty);
            u64* full = &pipeline.full[at.stage];
            if (lane == 0) {
                mbarrier_arrive_expect_tx(full, QG_TILE_M * STAGE_K + CTA_ROW_TILES * STAGE_K_TILES * QG_K_TILE_BYTES);
                cp_async_bulk_tensor_2d(pipeline.x[at.stage], &params.x_map, (i32)(k * STAGE_K), (i32)work.own.first, full);
                // Experts may share one weight.
                // K-tiles and row tiles past the end are zero-filled.
                const i32 expert = params.gemm.groups.row_pitch == 0 ? 0 : (i32)work.own.expert;
                const i32 from[5] = {0, 0, (i32)(k * STAGE_K_TILES), (i32)(work.n_tile * CTA_ROW_TILES), expert};
                cp_async_bulk_tensor_5d(pipeline.w[at.stage][0], &params.w_map, from, full);
            }
            Position::next(at);
        }
    }
    Position::wait_empty(at, pipeline.empty);
    if (lane == 0) {
        WorkTileInfo::write(infos.info[info], {});
        mbarrier_arrive(&pipeline.full[at.stage]);
    }
}
#else
// The X thread; it arrives on full barriers for all bulk copies.
// Tokens past the last are not copied.
QG_DEVICE void produce_x(Pipeline& pipeline, const W4A8Params& params) {
    const GemmParams& p = params.gemm;
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
            mbarrier_arrive_expect_tx(full, tokens * STAGE_K + CTA_ROW_TILES * STAGE_K_TILES * QG_K_TILE_BYTES);
            cp_async_bulk_tensor_2d(pipeline.x[at.stage], map, (i32)(k * STAGE_K), (i32)token, full);
            Position::next(at);
        }
    }
}

// A warp that copies W; independent of the previous kernel.
// Row tiles past the last are recomputed and not stored.
// If K ends within a stage, its last k-tile is copied twice:
// X is zero there.
QG_DEVICE void produce_w(Pipeline& pipeline, const GemmParams& p, u32 warp, u32 lane) {
    const u32 tile = lane * W_PRODUCERS + warp;
    const bool copies = tile < CTA_ROW_TILES;
    const u32 k_tiles = (p.shape.stored_k + QG_K_TILE - 1) / QG_K_TILE;
    const u32 last_tile = (p.shape.stored_rows + QG_TILE_ROWS - 1) / QG_TILE_ROWS - 1;
    WorkList list = WorkList::of_cta(p);
    WorkTile work;
    Position at = {};
    while (WorkList::next(list, p, work)) {
        const u32 own = work.n_tile * CTA_ROW_TILES + (copies ? tile : 0);
        const u8* rows = reinterpret_cast<const u8*>(p.at.w) + (u64)(own < last_tile ? own : last_tile) * k_tiles * QG_K_TILE_BYTES;
#pragma unroll 1
        for (u32 k = work.begin; k < work.end; k++) {
            Position::wait_empty(at, pipeline.empty);
            if (copies) {
                u8* to = pipeline.w[at.stage][tile];
                u64* full = &pipeline.full[at.stage];
                const u8* from = rows + (u64)k * STAGE_K_TILES * QG_K_TILE_BYTES;
                if ((k + 1) * STAGE_K_TILES <= k_tiles) {
                    cp_async_bulk(to, from, STAGE_K_TILES * QG_K_TILE_BYTES, full);
                } else {
#pragma unroll
                    for (u32 i = 0; i < STAGE_K_TILES; i++) cp_async_bulk(to + i * QG_K_TILE_BYTES, from, QG_K_TILE_BYTES, full);
                }
            }
            Position::next(at);
        }
    }
}
static_assert(STAGE_K_TILES <= 2, "one k-tile at most is missing");
#endif

// The warp that copies scales of X.
// Tokens past the last get zeros.
QG_DEVICE void produce_scales(Pipeline& pipeline, const W4A8Params& params, u32 lane) {
    const GemmParams& p = params.gemm;
    WorkList list = WorkList::of_cta(p);
    WorkTile work;
    Position at = {};
    griddepcontrol_wait();
    while (WorkList::next(list, p, work)) {
        const TileRows rows = TileRows::of(p, work);
#pragma unroll 1
        for (u32 k = work.begin; k < work.end; k++) {
            Position::wait_empty(at, pipeline.empty);
            // Producers have few registers.
#pragma unroll 1
            for (u32 i = lane; i < QG_TILE_M; i += 32) {
                const bool is_there = i < rows.count;
                const u8* row = reinterpret_cast<const u8*>(params.x.scales) + (u64)(is_there ? rows.first + i : 0) * params.x.scales_row;
                cp_async_4(reinterpret_cast<u8*>(&pipeline.of_tokens[at.stage][i]), row + (u64)k * 4, is_there ? 4 : 0);
            }
            cp_async_mbarrier_arrive(&pipeline.full[at.stage]);
            Position::next(at);
        }
    }
#if QG_EXPERT_TILES
    // An empty stage marks the end.
    Position::wait_empty(at, pipeline.empty);
    mbarrier_arrive(&pipeline.full[at.stage]);
#endif
}

#if QG_SUMS_OF_X
// Whether rows of a stage have zero points that act on sums.
// All lanes of a warp call it.
QG_DEVICE bool wants_sums(const Pipeline& pipeline, u32 stage, u32 lane) {
    bool wants = false;
    const u8* k_tile = pipeline.w[stage][lane / QG_TILE_ROWS];
#pragma unroll 1
    for (u32 i = 0; i < CTA_ROW_TILES; i += 32 / QG_TILE_ROWS) {
        KTile record;
        KTile::Scales1::load_one<FromShared>(record.scales1, k_tile, lane % QG_TILE_ROWS);
        wants |= RowCodes::leaves(KTile::Scales1::byte(record.scales1, 0, 0));
        k_tile += 32 / QG_TILE_ROWS * QG_K_TILE_BYTES;
    }
    return ballot(wants) != 0;
}

// The warp that sums the codes of X.
QG_DEVICE void produce_sums(Pipeline& pipeline, const GemmParams& p, u32 lane) {
    WorkList list = WorkList::of_cta(p);
    WorkTile work;
    Position at = {};
    while (WorkList::next(list, p, work)) {
        // Tokens of the tile; missing tokens count as zero.
        const u32 tokens = TileRows::of(p, work).count;
#pragma unroll 1
        for (u32 count = work.end - work.begin; count > 0; count--) {
            mbarrier_wait(&pipeline.full[at.stage], at.parity);
            // Opaque: derived values are recomputed here, because
            // producers have few registers.
            const u32 own = opaque_register(lane);
            const u32 wanted = wants_sums(pipeline, at.stage, own) ? QG_TILE_M : 0;
#pragma unroll 1
            for (u32 token = own; token < wanted; token += 32 * SUMS_AT_ONCE) {
                // Neighbouring lanes start in neighbouring banks.
                const u32 first = token * STAGE_K + token % 8 * 16;
                i32 sum[SUMS_AT_ONCE] = {};
#pragma unroll 2
                for (u32 chunk = 0; chunk < STAGE_K; chunk += 16) {
                    const u8* from = pipeline.x[at.stage] + (first ^ chunk);
#pragma unroll
                    for (u32 i = 0; i < SUMS_AT_ONCE; i++) {
                        u32x4 v = {};
                        if (token + i * 32 < tokens) v = ld_shared(reinterpret_cast<const u32x4*>(from + i * 32 * STAGE_K));
                        sum[i] = dp4a((i32)v.x, (i32)EACH_BYTE, dp4a((i32)v.y, (i32)EACH_BYTE, sum[i]));
                        sum[i] = dp4a((i32)v.z, (i32)EACH_BYTE, dp4a((i32)v.w, (i32)EACH_BYTE, sum[i]));
                    }
                }
#pragma unroll
                for (u32 i = 0; i < SUMS_AT_ONCE; i++) st_shared(&pipeline.of_tokens[at.stage][token + i * 32], (u32)sum[i]);
            }
            warp_barrier();
            if (lane == 0) {
                mbarrier_arrive(&pipeline.added[at.stage]);
                mbarrier_arrive(&pipeline.empty[at.stage]);
            }
            Position::next(at);
        }
    }
}
#endif

#if QG_EXPERT_TILES
// Work of the producer warpgroup; `thread` is its thread index.
// The last CTA has the fewest tiles.
// It then validates the index, with `words` in shared memory.
QG_DEVICE void produce(Pipeline& pipeline, const W4A8Params& params, u32 thread, WorkTileInfoRing& infos, u32* words) {
    constexpr u32 THREADS = 128, BARRIER = 4;
    // The previous launch may write the index, which selects W.
    griddepcontrol_wait();
    const u32 warp = shfl_idx_u32(thread / 32, 0), lane = thread % 32;
    if (warp == 0) produce_x_and_w(pipeline, params, infos, lane);
    if (QG_X_BLOCK_SCALES && warp == 1) produce_scales(pipeline, params, lane);
#if QG_SUMS_OF_X
    if (warp == 1) produce_sums(pipeline, params.gemm, lane);
#endif
    if (cta_index().x + 1 == grid_ctas().x)
        store_faults<THREADS>(params.gemm.groups, words, thread, [] { barrier_sync(BARRIER, THREADS); });
}
#else
// Work of the producer warpgroup; `thread` is its thread index.
QG_DEVICE void produce(Pipeline& pipeline, const W4A8Params& params, u32 thread) {
    const u32 warp = thread / 32, lane = thread % 32;
    if (warp == 0) {
        if (lane == 0) produce_x(pipeline, params);
    } else if (warp <= W_PRODUCERS) {
        produce_w(pipeline, params.gemm, warp - 1, lane);
    } else if constexpr (QG_X_BLOCK_SCALES) {
        produce_scales(pipeline, params, lane);
    }
#if QG_SUMS_OF_X
    else {
        produce_sums(pipeline, params.gemm, lane);
    }
#endif
}
#endif
