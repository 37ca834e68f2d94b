// Ring of FP8 GEMM: 128 columns a stage, all
// tokens and features.
// One thread copies X and one copies W, both by TMA.
// One or two warps copy scales (mainloop/sm90/fp8_scales.cuh).
#pragma once
#include "atoms/mbarrier_suspended.cuh"
#include "atoms/sync.cuh"
#include "atoms/tma_multicast.cuh"
#include "atoms/tma_tensor5.cuh"
#include "atoms/warp.cuh"
#include "mainloop/fp8_codes.cuh"
#include "mainloop/ring.cuh"
#include "mainloop/sm90/cluster.cuh"
#include "mainloop/sm90/work_tile_info.cuh"
#include "mainloop/tma_params.cuh"
#include "sched/tile.cuh"
#if QG_W_LINES
#include "mainloop/sm90/w_lines.cuh"
#endif

struct TmaFp8GemmParams {
    Fp8GemmParams fp8;
    // X codes: [tokens][columns], 128-byte swizzle.
    // Boxes have 128 columns and a whole token tile.
    // The tail map has the size of a partial last token tile.
    TensorMap x_map, x_tail_map;
    // Packed W codes, 128-byte swizzle:
    // [k-tile][k-block][row tile][8 row pairs][128 bytes].
    // Boxes have two k-blocks of all row tiles of a share.
    // wgmma reads rows of 64 bytes with the 64-byte swizzle.
    // The two swizzles differ only in address bit 6, which selects
    // the lower or upper row of a pair.
    // So rows 2i and 2i + 1 are swapped in odd groups of eight
    // (`ROWS_EXCHANGED`).
    // TMA then copies half as many rows as with 64-byte boxes.
    TensorMap w_map;
#if QG_W_LINES
    // W in lines, 128-byte swizzle: [row tile][line][128 bytes].
    // Boxes have the lines of a k-tile of all row tiles.
    // The second map covers the last k-tiles of the row tiles.
    // wgmma reads two rows of W as the halves of one 128-byte row.
    TensorMap w_last_map;
#endif
};

// The largest tile is bound by instructions, smaller
// tiles by memory.
constexpr bool IS_LARGEST = QG_TILE_M * QG_TILE_N >= 128 * 256;
static_assert(!QG_W_LINES || (!IS_LARGEST && QG_CLUSTER == 1), "tiles that memory bounds");

// Whether scales pass through registers
// (mainloop/sm90/fp8_scales.cuh): in the largest tile, except
// for experts, where it does not help.
// SCALE_WARPS copy scales. FILLING counts arrivals per stage:
// the X thread, and the scale warps or the lanes of one.
constexpr bool SCALES_IN_REGISTERS = !QG_EXPERT_TILES && IS_LARGEST;
constexpr u32 SCALE_WARPS = SCALES_IN_REGISTERS ? 2 : 1;
constexpr u32 FILLING = 1 + (HAS_BLOCK_SCALES ? (SCALES_IN_REGISTERS ? SCALE_WARPS : 32) : 0);

// Whether feature pairs are swapped in odd groups of eight
// (`TmaFp8GemmParams::w_map`).
constexpr bool ROWS_EXCHANGED = !QG_W_LINES;

// First thread of the producer warpgroup.
constexpr u32 FIRST_PRODUCER = QG_THREADS - 128;

// Features that a CTA copies for its cluster.
constexpr u32 SHARE_N = QG_TILE_N / QG_CLUSTER;
// Byte stride of k-blocks in a share.
constexpr u32 SHARE_K_BLOCK = SHARE_N * PACKED_K_BLOCK;
// Bytes of W that are copied per stage.
#if QG_W_LINES
constexpr u32 W_COPIED = W_ROW_TILES * LINES_BYTES;
#else
constexpr u32 W_COPIED = QG_TILE_N * STAGE_K;
#endif

// Rows of X per box. An expert's last tile copies only the
// boxes that contain its rows.
constexpr u32 X_BOX = QG_EXPERT_TILES && QG_TILE_M == 64 ? 32 : QG_TILE_M;

// First token of this CTA in a work tile, which covers all
// CTAs of the cluster.
QG_DEVICE u32 first_token_of(const WorkTile& work) {
    const u32 rank = QG_CLUSTER > 1 ? cta_index().x % QG_CLUSTER : 0;
    return (work.m_tile * QG_CLUSTER + rank) * QG_TILE_M;
}

struct Pipeline {
    // TMA's swizzle depends on the address:
    // both arrays are 1024-byte aligned.
    alignas(16) u8 x[QG_STAGES][QG_TILE_M * STAGE_K];  // [stage][token][column]
#if QG_W_LINES
    u8 w[QG_STAGES][W_STAGE_BYTES];  // [stage][row tile][line]
#else
    u8 w[QG_STAGES][QG_CLUSTER][STAGE_K_BLOCKS * SHARE_K_BLOCK];  // [stage][share][k-block][row][byte]
#endif
    StageScales scales[QG_STAGES];
    u64 full[QG_STAGES];
    u64 empty[QG_STAGES];

    // The first thread initializes, before a cluster barrier.
    QG_DEVICE void init(Pipeline& pipeline) {
        init_ring(pipeline.full, pipeline.empty, FILLING, QG_CONSUMERS / 32 * QG_CLUSTER);
    }
    // A warp calls it after it has read all of a stage.
    QG_DEVICE void release(Pipeline& pipeline, u32 stage, u32 lane) { release_stage(&pipeline.empty[stage], lane); }
#if !QG_W_LINES
    // First k-block of W from row `row` of the tile on.
    QG_DEVICE const u8* w_rows(const Pipeline& pipeline, u32 stage, u32 row) {
        return pipeline.w[stage][row / SHARE_N] + row % SHARE_N * PACKED_K_BLOCK;
    }
#endif
};

// Position in the ring; one word encodes stage and parity.
// The compiler keeps this word in a uniform register.
// A separate parity would need a vector register,
// and none is left.
struct Position {
    // Stages passed, modulo two turns of the ring.
    u32 passed;

    QG_DEVICE u32 stage(const Position& at) { return at.passed < QG_STAGES ? at.passed : at.passed - QG_STAGES; }
    QG_DEVICE u32 parity(const Position& at) { return at.passed < QG_STAGES ? 0 : 1; }
    QG_DEVICE void next(Position& at) { at.passed = at.passed + 1 < 2 * QG_STAGES ? at.passed + 1 : 0; }
    QG_DEVICE void wait_full(const Position& at, Pipeline& pipeline) { mbarrier_wait_suspended(&pipeline.full[stage(at)], parity(at)); }
    // The phase before the first counts as complete, so a stage
    // that was never filled is empty.
    QG_DEVICE void wait_empty(const Position& at, Pipeline& pipeline) {
        mbarrier_wait_suspended(&pipeline.empty[stage(at)], parity(at) ^ 1);
    }
};

// The X thread: copies X, publishes tile info and arrives on
// full barriers for X and W.
// Tokens past the last are not copied, with two exceptions:
// a tile without any tokens, and the largest tile, whose lanes
// do not check tokens. There they are zero-filled.
QG_DEVICE void produce_x(Pipeline& pipeline, WorkTileInfoRing& infos, const TmaFp8GemmParams& params) {
    const GemmParams& p = params.fp8.gemm;
    WorkList list = WorkList::of_cta(p);
    WorkTile work;
    Position at = {};
    u32 info = 0;
    griddepcontrol_wait();
    while (WorkList::next(list, p, work)) {
        Position::wait_empty(at, pipeline);
        WorkTileInfo::write(infos.info[info], work);
        info = WorkTileInfoRing::next(info);
        // The second CTA of a cluster may have no tokens.
        const u32 token = first_token_of(work), left = token < p.shape.m ? p.shape.m - token : QG_TILE_M;
        const u32 tokens = !IS_LARGEST && left < QG_TILE_M ? left : QG_TILE_M;
        const TensorMap* map = tokens < QG_TILE_M ? &params.x_tail_map : &params.x_map;
#pragma unroll 1
        for (u32 k = work.begin; k < work.end; k++) {
            Position::wait_empty(at, pipeline);
            u64* full = &pipeline.full[Position::stage(at)];
            mbarrier_arrive_expect_tx(full, tokens * STAGE_K + W_COPIED);
            cp_async_bulk_tensor_2d(pipeline.x[Position::stage(at)], map, (i32)(k * STAGE_K), (i32)token, full);
            Position::next(at);
        }
    }
    Position::wait_empty(at, pipeline);
    WorkTileInfo::write(infos.info[info], {});
    mbarrier_arrive(&pipeline.full[Position::stage(at)]);
}

// Copies this CTA's share of W from `first_row` on, for stage
// `k`, to all CTAs of the cluster. One thread calls it.
QG_DEVICE void copy_w(Pipeline& pipeline, const Position& at, const TmaFp8GemmParams& params, u32 first_row, u32 k) {
#if QG_W_LINES
    const KTileLines lines = KTileLines::of(k, params.fp8.gemm.shape.k_tiles);
    const TensorMap* map = lines.is_last ? &params.w_last_map : &params.w_map;
    u64* full = &pipeline.full[Position::stage(at)];
    cp_async_bulk_tensor_5d(pipeline.w[Position::stage(at)], map, {0, (i32)lines.line, (i32)(first_row / 16), 0, 0}, full);
#else
    copy_share<QG_CLUSTER>([&](u32 share) {
        const i32 row_tile = (i32)((first_row + share * SHARE_N) / 16);
        const i32 k_tile = (i32)(k * (STAGE_K_BLOCKS / K_TILE_K_BLOCKS));
        u8* to = pipeline.w[Position::stage(at)][share];
        u64* full = &pipeline.full[Position::stage(at)];
        if constexpr (QG_CLUSTER > 1)
            cp_async_bulk_tensor_5d_multicast(to, &params.w_map, {0, 0, row_tile, 0, k_tile}, full, ALL_CTAS);
        else
            cp_async_bulk_tensor_5d(to, &params.w_map, {0, 0, row_tile, 0, k_tile}, full);
    });
#endif
}

// The W thread; independent of the previous kernel.
QG_DEVICE void produce_w(Pipeline& pipeline, const TmaFp8GemmParams& params) {
    const GemmParams& p = params.fp8.gemm;
    WorkList list = WorkList::of_cta(p);
    WorkTile work;
    Position at = {};
    while (WorkList::next(list, p, work)) {
#pragma unroll 1
        for (u32 k = work.begin; k < work.end; k++) {
            // Consumers of all CTAs of the cluster have released the stage.
            Position::wait_empty(at, pipeline);
            copy_w(pipeline, at, params, work.n_tile * QG_TILE_N, k);
            Position::next(at);
        }
    }
}
