// Fills the rings of products of signed bytes: W by `cp.async`, as for other operands; X through registers, which change the order of
// its bytes. What a thread has loaded of a k-block it stores when it loads the next one.
#pragma once
#include "atoms/cp_async.cuh"
#include "atoms/mbarrier.cuh"
#include "atoms/opaque_register.cuh"
#include "mainloop/parked_state.cuh"
#include "mainloop/signed_byte_ring.cuh"
#include "mainloop/w_ring.cuh"
#include "sched/split.cuh"

// K-blocks on their way while one is multiplied, the last of them in registers. Of the two other stages, one holds that k-block, and
// one holds the k-block before it, which the slowest warp may still be reading.
constexpr u32 BYTE_PREFETCH = QG_X_STAGES - 2;
static_assert(BYTE_PREFETCH >= 2, "a k-block in registers is stored before a warp waits for it");
static_assert(QG_W_STAGES == 1 + (BYTE_PREFETCH + K_BLOCKS - 1) / K_BLOCKS, "k-tiles for all k-blocks on their way");
constexpr u32 K_TILE_CHUNKS = QG_K_TILE_BYTES / 16;
static_assert(ROW_TILES <= 2, "a warp has a first and a second row tile");

struct BytePipeline {
    ByteStage x[QG_X_STAGES];
    WStage w[QG_W_STAGES];
    u64 full[QG_X_STAGES];
    u64 empty[QG_X_STAGES];

    // For the first thread, before a CTA barrier.
    QG_DEVICE void init(BytePipeline& pipeline) {
#pragma unroll
        for (u32 i = 0; i < QG_X_STAGES; i++) {
            // Every thread arrives with its copies of W, and once more when it has stored its part of X.
            mbarrier_init(&pipeline.full[i], 2 * QG_THREADS);
            mbarrier_init(&pipeline.empty[i], QG_THREADS / 32);
        }
    }
};

// Walks through the CTA's work as the main loop does, BYTE_PREFETCH k-blocks before it, across tile borders.
struct ByteProducer {
    // K-tiles of the present tile that are still to be copied; none when there is no more work.
    u32 k_tiles;
    // The next stage of W, and the shared address of the lane's part in the first stage.
    u32 w_at, w_target;
    // The address of the lane's part of the warp's first row tile at the next k-tile, and the distance to the second row tile.
    const u8* w;
    u32 w_pitch;
    // The next k-block of X.
    u32 first_token, column;
    // What is loaded, and the stage that waits for it; NO_STAGE where none does.
    LoadedX loaded;
    u32 loaded_for;

    static constexpr u32 NO_STAGE = ~0u;

    QG_DEVICE void start(ByteProducer& s, const GemmParams& p, BytePipeline& pipeline, Parked<WorkList>& list,
                         u32 thread) {
        Parked<WorkList>::store(list, WorkList::of_cta(p), thread % 32);
        s.w_at = 0;
        s.w_target = opaque_register(shared_address(pipeline.w[0].k_tile[thread / 32 * ROW_TILES]) + thread % 32 * 16);
        s.loaded_for = NO_STAGE;
        next_tile(s, p, list, thread);
    }

    // `list` is the work after the present tile.
    QG_DEVICE void next_tile(ByteProducer& s, const GemmParams& p, Parked<WorkList>& list, u32 thread) {
        WorkTile work;
        s.k_tiles = 0;
        if (!take_next(list, p, work, thread % 32)) return;
        s.k_tiles = work.end - work.begin;
        const u32 first = work.n_tile * CTA_ROW_TILES + thread / 32 * ROW_TILES;
        s.w_pitch = (u32)(row_tile(p, first + 1, 0) - row_tile(p, first, 0));
        s.w = row_tile(p, first, work.begin) + thread % 32 * 16;
        s.first_token = work.m_tile * QG_TILE_M;
        s.column = work.begin * QG_K_TILE;
    }

    // Stores what was loaded, then starts on the next k-block, number `k_block` of its k-tile, for stage `stage`.
    QG_DEVICE void copy(ByteProducer& s, BytePipeline& pipeline, Parked<WorkList>& list, const SignedByteParams& given,
                        u32 k_block, u32 stage, u32 thread) {
        if (s.loaded_for != NO_STAGE) {
            LoadedX::store(s.loaded, pipeline.x[s.loaded_for], thread);
            mbarrier_arrive(&pipeline.full[s.loaded_for]);
            s.loaded_for = NO_STAGE;
        }
        if (s.k_tiles == 0) return;
        if (k_block == 0) copy_w(s, thread % 32);
        cp_async_mbarrier_arrive(&pipeline.full[stage]);
        LoadedX::load(s.loaded, given, s.first_token, s.column, thread);
        s.loaded_for = stage;
        s.column += K_BLOCK;
        if (k_block + 1 == K_BLOCKS && --s.k_tiles == 0) next_tile(s, given.gemm, list, thread);
    }

    QG_DEVICE void copy_w(ByteProducer& s, u32 lane) {
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

// A position in the rings.
struct BytePosition {
    u32 x, w;
    u32 parity;

    // The stage of the k-block before the last one, which is filled next, and the parity of its phase of `empty`. In the first round
    // that phase counts as complete.
    QG_DEVICE u32 free_stage(const BytePosition& at) { return at.x < 2 ? at.x + BYTE_PREFETCH : at.x - 2; }
    QG_DEVICE u32 free_parity(const BytePosition& at) { return at.x < 2 ? at.parity ^ 1 : at.parity; }

    QG_DEVICE void next_k_block(BytePosition& at) {
        if (++at.x == QG_X_STAGES) at.x = 0, at.parity ^= 1;
    }
    QG_DEVICE void next_k_tile(BytePosition& at) {
        if (++at.w == QG_W_STAGES) at.w = 0;
    }
};
