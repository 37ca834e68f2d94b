// The rings of a block whose last warp feeds the others, on Hopper: one warp asks the copy engine for W and X as soon as a
// stage is free, and the warpgroups that multiply wait for nothing but data.
#pragma once
#include "atoms/mbarrier.cuh"
#include "atoms/tma.cuh"
#include "atoms/warp.cuh"
#include "mainloop/w_ring.cuh"
#include "mainloop/x_ring.cuh"
#include "sched/tile.cuh"

// A slab of W is overwritten when the stage of its successor's first chunk is: by then its own last chunk is done with.
static_assert(QG_W_STAGES == 1 + (QG_X_STAGES - 1 + CHUNKS - 1) / CHUNKS, "slabs for all stages of X");

// X as the copy engine knows it: [tokens][columns], boxes of a stage, 128-byte swizzle.
struct alignas(64) TensorMap {
    u64 word[16];
};

// The kernel's parameter.
struct FedGemmParams {
    GemmParams gemm;
    TensorMap x_map;
};

struct Pipeline {
    XStage x[QG_X_STAGES];
    WStage w[QG_W_STAGES];
    u64 full[QG_X_STAGES];
    u64 empty[QG_X_STAGES];

    // By the first thread, before a block barrier.
    QG_DEVICE void init(Pipeline& pipeline) {
#pragma unroll
        for (u32 i = 0; i < QG_X_STAGES; i++) {
            mbarrier_init(&pipeline.full[i], 1);
            mbarrier_init(&pipeline.empty[i], QG_CONSUMERS / 32);
        }
        fence_mbarrier_init();
    }
};

// A place in the rings.
struct Position {
    u32 x, w;
    // How often X's ring has gone round, modulo 2.
    u32 parity;

    QG_DEVICE void next_chunk(Position& at) {
        if (++at.x == QG_X_STAGES) at.x = 0, at.parity ^= 1;
    }
    QG_DEVICE void next_slab(Position& at) {
        if (++at.w == QG_W_STAGES) at.w = 0;
    }
};

// All that the feeding warp does: it walks through the block's work as the others do.
QG_DEVICE void feed(Pipeline& pipeline, const FedGemmParams& params, u32 lane) {
    const GemmParams& p = params.gemm;
    WorkList list = WorkList::of_block(p);
    TileWork work;
    Position at = {};
    while (WorkList::next(list, p, work)) {
        // Every lane copies one tile of rows.
        const u8* w = row_tile(p, work.n_tile * BLOCK_ROW_TILES + lane % BLOCK_ROW_TILES, work.begin);
        const u32 token = work.m_tile * QG_TILE_M;
#pragma unroll 1
        for (u32 slab = work.begin; slab < work.end; slab++) {
#pragma unroll
            for (u32 chunk = 0; chunk < CHUNKS; chunk++) {
                u64* full = &pipeline.full[at.x];
                // Of a stage that has never been filled, the phase before the first counts as complete.
                mbarrier_wait(&pipeline.empty[at.x], at.parity ^ 1);
                if (lane == 0) {
                    const u32 w_bytes = chunk == 0 ? BLOCK_ROW_TILES * QG_SLAB_BYTES : 0;
                    mbarrier_arrive_expect_tx(full, X_STAGE_BYTES + w_bytes);
                    cp_async_bulk_tensor_2d(pipeline.x[at.x].bytes, &params.x_map, slab * QG_SLAB_K + chunk * CHUNK_K,
                                            token, full);
                }
                if (chunk == 0) {
                    warp_barrier();
                    if (lane < BLOCK_ROW_TILES)
                        cp_async_bulk(pipeline.w[at.w].slab[lane], w, QG_SLAB_BYTES, full);
                    w += QG_SLAB_BYTES;
                    Position::next_slab(at);
                }
                Position::next_chunk(at);
            }
        }
    }
}
