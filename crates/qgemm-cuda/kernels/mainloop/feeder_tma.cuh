// Fills the rings with the copy engine, Hopper and newer: one lane of each warp asks for the slabs of the warp's rows, and
// one of the block for its X.
#pragma once
#include "atoms/tma.cuh"
#include "mainloop/fed_params.cuh"
#include "mainloop/kept_work.cuh"
#include "mainloop/pipeline.cuh"
#include "sched/split.cuh"

// Walks through the block's work as the main loop does, but ahead of it, also from one tile into the next: so a tile's
// first chunks arrive while the tile before it is being stored.
struct Feeder {
    // Slabs of the present tile that are still to be copied; none when there is no more work.
    u32 slabs;
    // The next stage of W.
    u32 w_at;
    // The warp's row tiles at the next slab, and the block's first token and next column.
    const u8* w[ROW_TILES];
    u32 token, column;

    QG_DEVICE Feeder start(const GemmParams& p, Pipeline&, Kept<WorkList>& ahead, u32 thread) {
        Feeder f;
        Kept<WorkList>::put(ahead, WorkList::of_block(p), thread % 32);
        f.w_at = 0;
        next_tile(f, p, ahead, thread);
        return f;
    }

    // `ahead` is what follows the present tile.
    QG_DEVICE void next_tile(Feeder& f, const GemmParams& p, Kept<WorkList>& ahead, u32 thread) {
        TileWork work;
        f.slabs = 0;
        if (!take_next(ahead, p, work, thread % 32)) return;
        f.slabs = work.end - work.begin;
        f.token = work.m_tile * QG_TILE_M;
        f.column = work.begin * QG_SLAB_K;
        const u32 first = work.n_tile * BLOCK_ROW_TILES + thread / 32 * ROW_TILES;
#pragma unroll
        for (u32 rt = 0; rt < ROW_TILES; rt++) f.w[rt] = row_tile(p, first + rt, work.begin);
    }

    // Asks for the next chunk, the `chunk`-th of its slab, for stage `stage` of X.
    QG_DEVICE void copy(Feeder& f, Pipeline& pipeline, Kept<WorkList>& ahead, const FedGemmParams& params, u32 chunk, u32 stage,
                        u32 thread) {
        if (f.slabs == 0) return;
        if (thread % 32 == 0) {
            u64* full = &pipeline.full[stage];
            const u32 x_bytes = thread == 0 ? X_STAGE_BYTES : 0;
            mbarrier_arrive_expect_tx(full, x_bytes + (chunk == 0 ? ROW_TILES * QG_SLAB_BYTES : 0));
            if (x_bytes > 0) cp_async_bulk_tensor_2d(pipeline.x[stage].bytes, &params.x_map, f.column, f.token, full);
            if (chunk == 0) copy_w(f, pipeline, full, thread);
        }
        if (chunk == 0) {
            if (++f.w_at == QG_W_STAGES) f.w_at = 0;
#pragma unroll
            for (u32 rt = 0; rt < ROW_TILES; rt++) f.w[rt] += QG_SLAB_BYTES;
        }
        f.column += CHUNK_K;
        if (chunk + 1 == CHUNKS && --f.slabs == 0) next_tile(f, params.gemm, ahead, thread);
    }

    QG_DEVICE void copy_w(const Feeder& f, Pipeline& pipeline, u64* full, u32 thread) {
#pragma unroll
        for (u32 rt = 0; rt < ROW_TILES; rt++)
            cp_async_bulk(pipeline.w[f.w_at].slab[thread / 32 * ROW_TILES + rt], f.w[rt], QG_SLAB_BYTES, full);
    }
};
