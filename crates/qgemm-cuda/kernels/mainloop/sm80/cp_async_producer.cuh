// Ampere and Ada: all threads fill the rings with `cp.async`.
// Issue slots outside the tensor cores limit the main loop.
// So whole tiles have separate copy code, and parts of
// addresses stay in registers.
#pragma once
#include "atoms/cp_async.cuh"
#include "atoms/opaque_register.cuh"
#include "mainloop/scheduler_state.cuh"
#include "mainloop/sm80/pipeline.cuh"
#include "sched/rows.cuh"
#include "sched/split.cuh"

// 16-byte chunks of a k-tile.
constexpr u32 K_TILE_CHUNKS = QG_K_TILE_BYTES / 16;
// Tokens per pass of the CTA (a chunk each), and
// passes per stage.
constexpr u32 X_COPY_ROWS = QG_THREADS / X_ROW_CHUNKS;
constexpr u32 X_COPIES = QG_TILE_M / X_COPY_ROWS;
static_assert(X_COPIES * X_COPY_ROWS == QG_TILE_M, "all threads copy as many rows");
static_assert(X_COPY_ROWS % 8 == 0, "rows that a thread copies lie at the same place of the swizzle");

// A thread's share of X: 16 bytes of every X_COPY_ROWS-th token.
struct XSource {
    // Address in the next k-block; one per row if MoE
    // rows are gathered.
    const u8* row[QG_EXPERTS ? X_COPIES : 1];
    // Tokens from the tile's first, columns from the next k-block.
    u32 tokens, columns;
    // Shared address of the first row's bytes in stage 0.
    u32 target;

    QG_DEVICE void start_tile(XSource& s, const GemmParams& p, u32 first_token, u32 column, u32 thread) {
#pragma unroll
        for (u32 i = 0; i < (QG_EXPERTS ? X_COPIES : 1); i++) {
            u32 token;
            find_x_row(p, first_token + thread / X_ROW_CHUNKS + i * X_COPY_ROWS, token);
            s.row[i] = reinterpret_cast<const u8*>(p.at.x) + (token * p.at.x_row + column) * 2 +
                       thread % X_ROW_CHUNKS * X_CHUNK_BYTES;
        }
        s.tokens = p.shape.m - first_token;
        s.columns = column < p.shape.k ? p.shape.k - column : 0;
    }

    // Starts the copy of the next k-block to stage `stage`,
    // zero-filled outside X.
    QG_DEVICE void copy(XSource& s, const GemmParams& p, u32 stage, u32 thread) {
        const u32 target = s.target + stage * X_STAGE_BYTES;
        if (s.tokens >= QG_TILE_M && s.columns >= K_BLOCK)
            copy_rows<true>(s, p, target, thread);
        else
            copy_rows<false>(s, p, target, thread);
#pragma unroll
        for (u32 i = 0; i < (QG_EXPERTS ? X_COPIES : 1); i++) s.row[i] += X_ROW_BYTES;
        s.columns = s.columns < K_BLOCK ? 0 : s.columns - K_BLOCK;
    }

    // Bytes of the thread's chunk that lie in X.
    QG_DEVICE u32 bytes_inside(const XSource& s, u32 thread) {
        const u32 bytes = s.columns * 2, begin = thread % X_ROW_CHUNKS * X_CHUNK_BYTES;
        const u32 inside = begin < bytes ? bytes - begin : 0;
        return inside < X_CHUNK_BYTES ? inside : X_CHUNK_BYTES;
    }

    template <bool WHOLE>
    QG_DEVICE void copy_rows(const XSource& s, const GemmParams& p, u32 target, u32 thread) {
        const u32 bytes = WHOLE ? X_CHUNK_BYTES : bytes_inside(s, thread);
        const u8* row = s.row[0];
#pragma unroll
        for (u32 i = 0; i < X_COPIES; i++, row += p.at.x_row * (X_COPY_ROWS * 2)) {
            if constexpr (QG_EXPERTS) row = s.row[i];
            if constexpr (WHOLE)
                cp_async_16(target + i * X_COPY_ROWS * X_ROW_BYTES, row);
            else
                cp_async_16(target + i * X_COPY_ROWS * X_ROW_BYTES, row,
                            thread / X_ROW_CHUNKS + i * X_COPY_ROWS < s.tokens ? bytes : 0);
        }
    }
};
static_assert(ROW_TILES <= 2, "a warp has a first and a second row tile");

// Producer, PREFETCH_DISTANCE k-blocks ahead of the main loop.
// It runs ahead across tiles: the first k-blocks of a tile
// arrive while the previous tile is stored.
struct Producer {
    // K-tiles of the current tile left to copy; 0 at
    // the end of work.
    u32 k_tiles;
    // Next stage of W, and the lane's shared address in stage 0.
    u32 w_at, w_target;
    // The lane's address in the first row tile at the next k-tile,
    // and the distance to the second row tile, if any.
    // A distance takes one register.
    // A second address takes two; many formats would spill.
    const u8* w;
    u32 w_pitch;
    XSource x;

    QG_DEVICE Producer start(const GemmParams& p, Pipeline& pipeline, SharedCopy<WorkList>& list, u32 thread) {
        Producer s;
        SharedCopy<WorkList>::store(list, WorkList::of_cta(p), thread % 32);
        s.w_at = 0;
        s.w_target = opaque_register(shared_address(pipeline.w[0].k_tile[thread / 32 * ROW_TILES]) + thread % 32 * 16);
        s.x.target =
            opaque_register(shared_address(XStage::at(pipeline.x[0], thread / X_ROW_CHUNKS, thread % X_ROW_CHUNKS)));
        next_tile(s, p, list, thread);
        return s;
    }

    // `list` is the work after the current tile.
    QG_DEVICE void next_tile(Producer& s, const GemmParams& p, SharedCopy<WorkList>& list, u32 thread) {
        WorkTile work;
        s.k_tiles = 0;
        if (!take_next(list, p, work, thread % 32)) return;
        s.k_tiles = work.end - work.begin;
        const u32 first = work.n_tile * CTA_ROW_TILES + thread / 32 * ROW_TILES;
        s.w_pitch = (u32)(row_tile(p, first + 1, 0) - row_tile(p, first, 0));
        s.w = row_tile(p, first, work.begin) + thread % 32 * 16;
        XSource::start_tile(s.x, p, work.m_tile * QG_TILE_M, work.begin * QG_K_TILE, thread);
    }

    // Starts the copy of the next k-block to X stage `stage`.
    // `k_block` is its number in the k-tile.
    QG_DEVICE void copy(Producer& s, Pipeline& pipeline, SharedCopy<WorkList>& list, const GemmParams& p, u32 k_block,
                        u32 stage, u32 thread) {
        if (s.k_tiles == 0) return;
        if (k_block == 0) copy_w(s, thread % 32);
        XSource::copy(s.x, p, stage, thread);
        cp_async_mbarrier_arrive(&pipeline.full[stage]);
        if (k_block + 1 == K_BLOCKS && --s.k_tiles == 0) next_tile(s, p, list, thread);
    }

    QG_DEVICE void copy_w(Producer& s, u32 lane) {
        const u32 target = s.w_target + s.w_at * (u32)sizeof(WStage);
#pragma unroll
        for (u32 rt = 0; rt < ROW_TILES; rt++) {
            const u8* source = rt == 0 ? s.w : s.w + s.w_pitch;
#pragma unroll
            for (u32 i = 0; i < K_TILE_CHUNKS; i += 32)
                if (i + 32 <= K_TILE_CHUNKS || i + lane < K_TILE_CHUNKS)
                    cp_async_16(target + rt * QG_K_TILE_BYTES + i * 16, source + i * 16);
        }
        s.w += QG_K_TILE_BYTES;
        if (++s.w_at == QG_W_STAGES) s.w_at = 0;
    }
};
