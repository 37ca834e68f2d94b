// Fills the rings of products of signed bytes with `cp.async`. A thread that has waited for its copies of a k-block gives its bytes of
// X their order, then arrives.
#pragma once
#include "atoms/cp_async.cuh"
#include "atoms/mbarrier.cuh"
#include "atoms/opaque_register.cuh"
#include "mainloop/parked_state.cuh"
#include "mainloop/signed_byte_ring.cuh"
#include "mainloop/w_ring.cuh"
#include "sched/split.cuh"

// K-blocks in flight while one is multiplied. Of the two other stages, one holds that k-block, and
// one holds the k-block before it, which the slowest warp may still be reading.
constexpr u32 BYTE_PREFETCH = QG_X_STAGES - 2;
static_assert(BYTE_PREFETCH >= 2, "a k-block is put in order before a warp waits for it");
static_assert(QG_W_STAGES == 1 + (BYTE_PREFETCH + K_BLOCKS - 1) / K_BLOCKS, "k-tiles for all k-blocks in flight");
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
            mbarrier_init(&pipeline.full[i], QG_THREADS);
            mbarrier_init(&pipeline.empty[i], QG_THREADS / 32);
        }
    }
};

// The part of X that a thread copies: the same 16 bytes of the rows of every CHUNK_TURN_TOKENS-th token, and its share of scales.
struct ByteSource {
    // The address in the next k-block's columns, and that k-block's first column.
    const u8* row;
    u32 column;
    // The tile's first token.
    u32 first_token;

    QG_DEVICE void start_tile(ByteSource& s, const GemmParams& p, u32 first_token, u32 column, u32 thread) {
        const u32 token = first_token + thread / X_CHUNKS;
        s.row = reinterpret_cast<const u8*>(p.at.x) + token * p.at.x_row + column + thread % X_CHUNKS * X_CHUNK;
        s.column = column;
        s.first_token = first_token;
    }

    // Starts copying the next k-block. What lies outside X becomes zeros.
    QG_DEVICE void copy(ByteSource& s, const SignedByteParams& given, ByteStage& stage, u32 thread) {
        const GemmParams& p = given.gemm;
        const bool inside = s.column + thread % X_CHUNKS * X_CHUNK < p.shape.k;
        const u8* row = s.row;
#pragma unroll
        for (u32 i = 0; i < CHUNK_TURNS; i++, row += p.at.x_row * CHUNK_TURN_TOKENS) {
            if (!has_chunk(i, thread)) continue;
            const u32 token = thread / X_CHUNKS + i * CHUNK_TURN_TOKENS;
            cp_async_16(stage.codes + ByteStage::place(token, thread % X_CHUNKS), row,
                        inside && s.first_token + token < p.shape.m ? X_CHUNK : 0);
        }
        if constexpr (X_SCALES > 0) {
            const u32 column = s.column + thread % 2 * X_SCALE_COLUMNS;
            const u8* scales = reinterpret_cast<const u8*>(given.x.scales) + (u64)(column >> given.x.block_shift) * 4;
#pragma unroll
            for (u32 i = 0; i < SCALE_TURNS; i++) {
                if (!has_scale(i, thread)) continue;
                const u32 token = s.first_token + thread / 2 + i * SCALE_TURN_TOKENS;
                cp_async_4(reinterpret_cast<u8*>(&stage.scale[i * QG_THREADS + thread]),
                           scales + token * given.x.scales_row, column < p.shape.k && token < p.shape.m ? 4 : 0);
            }
        }
        s.row += K_BLOCK;
        s.column += K_BLOCK;
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
    ByteSource x;
    // K-blocks that are copied and not yet ready.
    u32 waiting;

    QG_DEVICE void start(ByteProducer& s, const GemmParams& p, BytePipeline& pipeline, Parked<WorkList>& list,
                         u32 thread) {
        Parked<WorkList>::store(list, WorkList::of_cta(p), thread % 32);
        s.w_at = s.waiting = 0;
        s.w_target = opaque_register(shared_address(pipeline.w[0].k_tile[thread / 32 * ROW_TILES]) + thread % 32 * 16);
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
        ByteSource::start_tile(s.x, p, work.m_tile * QG_TILE_M, work.begin * QG_K_TILE, thread);
    }

    // Starts copying the next k-block, number `k_block` of its k-tile, to stage `stage`: a group of copies, which is empty when there
    // is no more work.
    QG_DEVICE void copy(ByteProducer& s, BytePipeline& pipeline, Parked<WorkList>& list, const SignedByteParams& given,
                        u32 k_block, u32 stage, u32 thread) {
        if (s.k_tiles > 0) {
            if (k_block == 0) copy_w(s, thread % 32);
            ByteSource::copy(s.x, given, pipeline.x[stage], thread);
            s.waiting++;
            if (k_block + 1 == K_BLOCKS && --s.k_tiles == 0) next_tile(s, given.gemm, list, thread);
        }
        cp_async_commit_group();
    }

    // Waits for the oldest group but BYTE_PREFETCH - 1 and makes its k-block, in stage `stage`, ready, if there is one.
    QG_DEVICE void make_ready(ByteProducer& s, BytePipeline& pipeline, u32 stage, u32 thread) {
        if (s.waiting == 0) return;
        s.waiting--;
        cp_async_wait_group<BYTE_PREFETCH - 1>();
        order_bytes(pipeline.x[stage], thread);
        mbarrier_arrive(&pipeline.full[stage]);
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

    QG_DEVICE u32 next_stage(const BytePosition& at) { return at.x + 1 == QG_X_STAGES ? 0 : at.x + 1; }

    QG_DEVICE void next_k_block(BytePosition& at) {
        if (++at.x == QG_X_STAGES) at.x = 0, at.parity ^= 1;
    }
    QG_DEVICE void next_k_tile(BytePosition& at) {
        if (++at.w == QG_W_STAGES) at.w = 0;
    }
};
