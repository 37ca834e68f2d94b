// s8 GEMM: all threads fill the rings with `cp.async`.
// After its copies of a k-block complete, a thread permutes
// its bytes of X, then arrives.
#pragma once
#include "atoms/cp_async.cuh"
#include "atoms/mbarrier.cuh"
#include "atoms/opaque_register.cuh"
#include "mainloop/scheduler_state.cuh"
#include "mainloop/signed_byte_ring.cuh"
#include "mainloop/w_ring.cuh"
#include "sched/split.cuh"

// Stages in flight during the MMA of one.
// Two more stages hold that stage and the previous one, which
// the slowest warp may still read.
constexpr u32 BYTE_PREFETCH = QG_X_STAGES - 2;
static_assert(BYTE_PREFETCH >= 2, "a stage is put in order before a warp waits for it");
// A run is the k-tiles that arrive together, and spans
// RUN_STAGES stages.
constexpr u32 RUN_K_TILES = STAGE_K_BLOCKS > K_BLOCKS ? STAGE_K_BLOCKS / K_BLOCKS : 1;
constexpr u32 RUN_STAGES = RUN_K_TILES * K_BLOCKS / STAGE_K_BLOCKS;
static_assert(RUN_STAGES * STAGE_K_BLOCKS == RUN_K_TILES * K_BLOCKS, "runs are whole stages");
static_assert(QG_W_STAGES == 1 + (BYTE_PREFETCH + RUN_STAGES - 1) / RUN_STAGES, "runs for all stages in flight");
constexpr u32 RUN_BYTES = RUN_K_TILES * QG_K_TILE_BYTES, K_TILE_CHUNKS = QG_K_TILE_BYTES / 16, RUN_CHUNKS = RUN_BYTES / 16;
static_assert(ROW_TILES <= 2, "a warp has a first and a second row tile");

struct RunStage {
    alignas(16) u8 k_tile[CTA_ROW_TILES][RUN_BYTES];  // [row tile][byte]
};

struct BytePipeline {
    ByteStage x[QG_X_STAGES];
    RunStage w[QG_W_STAGES];
    u64 full[QG_X_STAGES];
    u64 empty[QG_X_STAGES];

    // The first thread initializes, before a CTA barrier.
    QG_DEVICE void init(BytePipeline& pipeline) {
#pragma unroll
        for (u32 i = 0; i < QG_X_STAGES; i++) {
            mbarrier_init(&pipeline.full[i], QG_THREADS);
            mbarrier_init(&pipeline.empty[i], QG_THREADS / 32);
        }
    }
};

// A thread's share of X: 16 bytes of every
// CHUNK_TURN_TOKENS-th token, and their scales.
struct ByteSource {
    // Address in the next stage, its first column, and the end of
    // the tile's columns.
    const u8* row;
    u32 column, end;
    // The tile's first token.
    u32 first_token;

    QG_DEVICE void start_tile(ByteSource& s, const GemmParams& p, const WorkTile& work, u32 thread) {
        s.first_token = work.m_tile * QG_TILE_M;
        s.column = work.begin * QG_K_TILE;
        s.end = work.end * QG_K_TILE < p.shape.k ? work.end * QG_K_TILE : p.shape.k;
        const u32 token = s.first_token + thread / X_CHUNKS;
        s.row = reinterpret_cast<const u8*>(p.at.x) + token * p.at.x_row + s.column + thread % X_CHUNKS * X_CHUNK;
    }

    // Starts the copy of the next stage, zero-filled outside X and
    // outside the work.
    QG_DEVICE void copy(ByteSource& s, const SignedByteParams& given, ByteStage& stage, u32 thread) {
        const GemmParams& p = given.gemm;
        const u32 chunk = thread % X_CHUNKS;
        const bool inside = s.column + chunk * X_CHUNK < s.end;
        const u8* row = s.row;
        // The thread of the first chunk of 32 columns copies their
        // scale, because it needs it.
        const bool copies_scale = X_SCALES > 0 && thread % 2 == 0;
        const u8* scales = reinterpret_cast<const u8*>(given.x.scales) +
                           (u64)(s.column + chunk * X_CHUNK >> given.x.block_shift) * 4;
#pragma unroll
        for (u32 i = 0; i < CHUNK_TURNS; i++, row += p.at.x_row * CHUNK_TURN_TOKENS) {
            if (!has_chunk(i, thread)) continue;
            const u32 at = thread / X_CHUNKS + i * CHUNK_TURN_TOKENS, token = s.first_token + at;
            const bool is_x = inside && token < p.shape.m;
            cp_async_16(stage.codes + ByteStage::place(at, chunk), row, is_x ? X_CHUNK : 0);
            if (copies_scale)
                cp_async_4(reinterpret_cast<u8*>(ByteStage::scale_of(stage, at, chunk)),
                           scales + token * given.x.scales_row, is_x ? 4 : 0);
        }
        s.row += STAGE_K;
        s.column += STAGE_K;
    }
};

// Producer, BYTE_PREFETCH stages ahead of the main
// loop, across tiles.
struct ByteProducer {
    // K-tiles of the current tile left to copy; 0 at
    // the end of work.
    u32 k_tiles;
    // Next stage of W, and the lane's shared address in stage 0.
    u32 w_at, w_target;
    // The lane's address in the warp's first row tile at the next
    // run, and the distance to the second row tile.
    const u8* w;
    u32 w_pitch;
    ByteSource x;
    // Stages that are copied but not yet permuted.
    u32 waiting;

    QG_DEVICE void start(ByteProducer& s, const GemmParams& p, BytePipeline& pipeline, SharedCopy<WorkList>& list,
                         u32 thread) {
        SharedCopy<WorkList>::store(list, WorkList::of_cta(p), thread % 32);
        s.w_at = s.waiting = 0;
        s.w_target = opaque_register(shared_address(pipeline.w[0].k_tile[thread / 32 * ROW_TILES]) + thread % 32 * 16);
        next_tile(s, p, list, thread);
    }

    // `list` is the work after the current tile.
    QG_DEVICE void next_tile(ByteProducer& s, const GemmParams& p, SharedCopy<WorkList>& list, u32 thread) {
        WorkTile work;
        s.k_tiles = 0;
        if (!take_next(list, p, work, thread % 32)) return;
        s.k_tiles = work.end - work.begin;
        const u32 first = work.n_tile * CTA_ROW_TILES + thread / 32 * ROW_TILES;
        s.w_pitch = (u32)(row_tile(p, first + 1, 0) - row_tile(p, first, 0));
        s.w = row_tile(p, first, work.begin) + thread % 32 * 16;
        ByteSource::start_tile(s.x, p, work, thread);
    }

    // Starts the copy of the next stage, number `part` of its run,
    // to stage `stage`, as one group.
    // The group is empty at the end of the work.
    QG_DEVICE void copy(ByteProducer& s, BytePipeline& pipeline, SharedCopy<WorkList>& list, const SignedByteParams& given, u32 part,
                        u32 stage, u32 thread) {
        if (s.k_tiles > 0) {
            if (part == 0) copy_w(s, thread % 32);
            ByteSource::copy(s.x, given, pipeline.x[stage], thread);
            s.waiting++;
            if (part + 1 == RUN_STAGES) {
                s.k_tiles = s.k_tiles > RUN_K_TILES ? s.k_tiles - RUN_K_TILES : 0;
                if (s.k_tiles == 0) next_tile(s, given.gemm, list, thread);
            }
        }
        cp_async_commit_group();
    }

    // Waits until BYTE_PREFETCH - 1 groups are in flight.
    // Then permutes and publishes stage `stage`, if there is one.
    QG_DEVICE void make_ready(ByteProducer& s, BytePipeline& pipeline, u32 stage, u32 thread) {
        if (s.waiting == 0) return;
        s.waiting--;
        cp_async_wait_group<BYTE_PREFETCH - 1>();
        order_bytes(pipeline.x[stage], thread);
        mbarrier_arrive(&pipeline.full[stage]);
    }

    // The run's second k-tile is zero if the work ends before it.
    QG_DEVICE void copy_w(ByteProducer& s, u32 lane) {
        const u32 target = s.w_target + s.w_at * (u32)sizeof(RunStage);
        const u32 chunks = RUN_K_TILES > 1 && s.k_tiles < RUN_K_TILES ? K_TILE_CHUNKS : RUN_CHUNKS;
#pragma unroll
        for (u32 rt = 0; rt < ROW_TILES; rt++) {
            const u8* source = rt == 0 ? s.w : s.w + s.w_pitch;
#pragma unroll
            for (u32 i = 0; i < RUN_CHUNKS; i += 32) {
                if (i + 32 > RUN_CHUNKS && i + lane >= RUN_CHUNKS) continue;
                if constexpr (RUN_K_TILES > 1)
                    cp_async_16(target + rt * RUN_BYTES + i * 16, source + i * 16, i + lane < chunks ? 16 : 0);
                else
                    cp_async_16(target + rt * RUN_BYTES + i * 16, source + i * 16);
            }
        }
        s.w += RUN_BYTES;
        if (++s.w_at == QG_W_STAGES) s.w_at = 0;
    }
};

// Position in the rings.
struct BytePosition {
    u32 x, w;
    u32 parity;

    // Stage before the previous one, which is filled next, and the
    // parity of its `empty` phase.
    // In the first round this phase counts as complete.
    QG_DEVICE u32 free_stage(const BytePosition& at) { return at.x < 2 ? at.x + BYTE_PREFETCH : at.x - 2; }
    QG_DEVICE u32 free_parity(const BytePosition& at) { return at.x < 2 ? at.parity ^ 1 : at.parity; }

    QG_DEVICE u32 next_stage(const BytePosition& at) { return at.x + 1 == QG_X_STAGES ? 0 : at.x + 1; }

    QG_DEVICE void next(BytePosition& at) {
        if (++at.x == QG_X_STAGES) at.x = 0, at.parity ^= 1;
    }
    QG_DEVICE void next_run(BytePosition& at) {
        if (++at.w == QG_W_STAGES) at.w = 0;
    }
};
