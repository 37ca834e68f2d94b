// Fills the rings with asynchronous copies of the threads (cp.async): Ampere and Ada.
#pragma once
#include "atoms/cp_async.cuh"
#include "mainloop/pipeline.cuh"
#include "sched/split.cuh"

// The kernel's parameter.
struct FedGemmParams {
    GemmParams gemm;
};

// 16-byte units of a slab.
constexpr u32 W_UNITS = QG_SLAB_BYTES / 16;
// Tokens of which the block copies a chunk at once, and how often it does so for a stage.
constexpr u32 X_COPY_ROWS = QG_THREADS / X_ROW_CHUNKS;
constexpr u32 X_COPIES = (QG_TILE_M + X_COPY_ROWS - 1) / X_COPY_ROWS;

// Where a thread's chunks lie in X, in the columns that it copies next: the same chunk of every X_COPY_ROWS-th token.
struct XSource {
    const u8* row;
    // Its first token, and how many bytes of its chunk lie inside X.
    u32 token, column, bytes;

    QG_DEVICE XSource of(const GemmParams& p, u32 first_token, u32 first_column, u32 thread) {
        XSource source;
        source.token = first_token + thread / X_ROW_CHUNKS;
        source.column = first_column + thread % X_ROW_CHUNKS * (X_CHUNK_BYTES / 2);
        source.row = reinterpret_cast<const u8*>(p.at.x) + (source.token * p.at.x_row + source.column) * 2;
        measure(source, p);
        return source;
    }

    QG_DEVICE void measure(XSource& source, const GemmParams& p) {
        const u32 inside = source.column < p.shape.k ? (p.shape.k - source.column) * 2 : 0;
        source.bytes = inside < X_CHUNK_BYTES ? inside : X_CHUNK_BYTES;
    }

    QG_DEVICE void next_stage(XSource& source, const GemmParams& p) {
        source.column += CHUNK_K;
        source.row += X_ROW_BYTES;
        measure(source, p);
    }

    // Starts copying chunk `i` of the thread's; what lies outside X becomes zero.
    QG_DEVICE void copy(const XSource& source, XStage& stage, const GemmParams& p, u32 i, u32 thread) {
        const u32 row = thread / X_ROW_CHUNKS + i * X_COPY_ROWS, chunk = thread % X_ROW_CHUNKS;
        if (QG_TILE_M % X_COPY_ROWS != 0 && row >= QG_TILE_M) return;
        cp_async_16(XStage::at(stage, row, chunk), source.row + i * X_COPY_ROWS * p.at.x_row * 2,
                    source.token + i * X_COPY_ROWS < p.shape.m ? source.bytes : 0);
    }
};

// Walks through the block's work as the main loop does, but ahead of it, also from one tile into the next: so a tile's
// first chunks arrive while the tile before it is being stored.
struct Feeder {
    WorkList list;
    Position at;
    // Slabs of the present tile that are still to be copied; none when there is no more work.
    u32 slabs;
    // The lane's part of the warp's row tiles at the next slab.
    const u8* w[ROW_TILES];
    XSource x;

    QG_DEVICE Feeder start(const GemmParams& p, u32 thread) {
        Feeder f;
        f.list = WorkList::of_block(p);
        f.at = {};
        next_tile(f, p, thread);
        return f;
    }

    QG_DEVICE void next_tile(Feeder& f, const GemmParams& p, u32 thread) {
        TileWork work;
        f.slabs = 0;
        if (!WorkList::next(f.list, p, work)) return;
        f.slabs = work.end - work.begin;
        const u32 first = work.n_tile * BLOCK_ROW_TILES + thread / 32 * ROW_TILES;
#pragma unroll
        for (u32 rt = 0; rt < ROW_TILES; rt++) f.w[rt] = row_tile(p, first + rt, work.begin) + thread % 32 * 16;
        f.x = XSource::of(p, work.m_tile * QG_TILE_M, work.begin * QG_SLAB_K, thread);
    }

    // The next chunk is the `chunk`-th of its slab. Its copies are issued in STEPS parts, so that they don't keep the
    // warp from issuing matrix instructions for long.
    QG_DEVICE void part(Feeder& f, Pipeline& pipeline, const FedGemmParams& params, u32 chunk, u32 step, u32 thread) {
        const GemmParams& p = params.gemm;
        if (f.slabs == 0) return;
        if (chunk == 0) part_of_w(f, pipeline, step, thread);
        const bool aligned = (p.shape.flags & QG_FLAG_X_ALIGNED16) && !(p.shape.flags & QG_FLAG_K_ORDER);
        if (aligned) {
#pragma unroll
            for (u32 i = step; i < X_COPIES; i += STEPS) XSource::copy(f.x, pipeline.x[f.at.x], p, i, thread);
        }
        if (step + 1 < STEPS) return;
        if (aligned) {
            cp_async_mbarrier_arrive(&pipeline.full[f.at.x]);
        } else {
            XStage::copy_any(pipeline.x[f.at.x], p, f.x.token - thread / X_ROW_CHUNKS,
                             f.x.column - thread % X_ROW_CHUNKS * (X_CHUNK_BYTES / 2), thread);
            cp_async_commit_group();
            cp_async_wait_group<0>();
            mbarrier_arrive(&pipeline.full[f.at.x]);
        }
        if (chunk == 0) Position::next_slab(f.at);
        Position::next_chunk(f.at);
        XSource::next_stage(f.x, p);
        if (chunk + 1 == CHUNKS && --f.slabs == 0) next_tile(f, p, thread);
    }

    QG_DEVICE void part_of_w(Feeder& f, Pipeline& pipeline, u32 step, u32 thread) {
        const u32 lane = thread % 32;
#pragma unroll
        for (u32 rt = step; rt < ROW_TILES; rt += STEPS) {
            u8* target = pipeline.w[f.at.w].slab[thread / 32 * ROW_TILES + rt] + lane * 16;
#pragma unroll
            for (u32 i = 0; i < W_UNITS; i += 32)
                if (i + 32 <= W_UNITS || i + lane < W_UNITS) cp_async_16(target + i * 16, f.w[rt] + i * 16, 16);
            f.w[rt] += QG_SLAB_BYTES;
        }
    }
};
