// X in signed bytes, a k-block of 64 columns a stage, with the scales of its blocks: 64 bytes a token, of which every 16 hold the
// columns of a k-step in the order of W's bytes, 0, 8, 1, 9, 2, 10, ... A row's 16-byte chunks are swizzled, chunk c of token r lies
// at c ^ (r / 2 % 4), so that the eight rows that `ldmatrix` reads at once lie in different banks.
//
// Nothing but registers can change the order of bytes: threads load their part of a stage one k-block before they store it.
#pragma once
#include "atoms/ldmatrix.cuh"
#include "atoms/memory.cuh"
#include "dequant/k_tile.cuh"
#include "sched/params.cuh"

// The parameter of products of signed bytes.
struct SignedByteParams {
    GemmParams gemm;
    XPlanePointers x;
};

constexpr u32 X_ROW = K_BLOCK, X_CHUNK = 16, X_CHUNKS = X_ROW / X_CHUNK;
// Scales of a token in a stage: one for every 32 columns, or none where all columns of a token share one, which then is a factor of
// the accumulators.
constexpr u32 X_SCALES = QG_X_BLOCK_SCALES ? 2 : 0;
constexpr u32 X_SCALE_COLUMNS = 32;

struct ByteStage {
    alignas(16) u8 codes[QG_TILE_M * X_ROW];
    alignas(16) float scale[QG_TILE_M * X_SCALES + (X_SCALES == 0 ? 4 : 0)];

    QG_DEVICE u32 place(u32 token, u32 chunk) { return token * X_ROW + (chunk ^ token / 2 % 4) * X_CHUNK; }
};

// What a thread loads of a stage.
constexpr u32 STAGE_CHUNKS = QG_TILE_M * X_CHUNKS, STAGE_SCALES = QG_TILE_M * X_SCALES;
constexpr u32 CHUNK_TURNS = (STAGE_CHUNKS + QG_THREADS - 1) / QG_THREADS;
constexpr u32 SCALE_TURNS = (STAGE_SCALES + QG_THREADS - 1) / QG_THREADS;

struct LoadedX {
    u32x4 chunk[CHUNK_TURNS];
    float scale[SCALE_TURNS == 0 ? 1 : SCALE_TURNS];

    // Of the k-block that begins at `column`, of the tokens from `first_token` on. What lies outside X is zeros.
    QG_DEVICE void load(LoadedX& x, const SignedByteParams& given, u32 first_token, u32 column, u32 thread) {
        const GemmParams& p = given.gemm;
#pragma unroll
        for (u32 i = 0; i < CHUNK_TURNS; i++) {
            const u32 index = i * QG_THREADS + thread, token = first_token + index / X_CHUNKS;
            const u32 at = column + index % X_CHUNKS * X_CHUNK;
            x.chunk[i] = {0, 0, 0, 0};
            if ((STAGE_CHUNKS % QG_THREADS != 0 && index >= STAGE_CHUNKS) || token >= p.shape.m || at >= p.shape.k)
                continue;
            x.chunk[i] = ld_global_v4(reinterpret_cast<const u8*>(p.at.x) + token * p.at.x_row + at);
        }
#pragma unroll
        for (u32 i = 0; i < SCALE_TURNS; i++) {
            const u32 index = i * QG_THREADS + thread, token = first_token + index / 2;
            const u32 at = column + index % 2 * X_SCALE_COLUMNS;
            x.scale[i] = 0.0f;
            if ((STAGE_SCALES % QG_THREADS != 0 && index >= STAGE_SCALES) || token >= p.shape.m || at >= p.shape.k)
                continue;
            const u8* row = reinterpret_cast<const u8*>(given.x.scales) + token * given.x.scales_row;
            x.scale[i] = bits_to_f32(ld_global_u32(row + (u64)(at >> given.x.block_shift) * 4));
        }
    }

    // Stores them, codes in their order.
    QG_DEVICE void store(const LoadedX& x, ByteStage& stage, u32 thread) {
#pragma unroll
        for (u32 i = 0; i < CHUNK_TURNS; i++) {
            const u32 index = i * QG_THREADS + thread;
            if (STAGE_CHUNKS % QG_THREADS != 0 && index >= STAGE_CHUNKS) continue;
            const u32x4 v = x.chunk[i];
            const u32x4 ordered = {prmt(v.x, v.z, 0x5140), prmt(v.x, v.z, 0x7362), prmt(v.y, v.w, 0x5140),
                                   prmt(v.y, v.w, 0x7362)};
            st_shared(reinterpret_cast<u32x4*>(stage.codes + ByteStage::place(index / X_CHUNKS, index % X_CHUNKS)),
                      ordered);
        }
#pragma unroll
        for (u32 i = 0; i < SCALE_TURNS; i++) {
            const u32 index = i * QG_THREADS + thread;
            if (STAGE_SCALES % QG_THREADS != 0 && index >= STAGE_SCALES) continue;
            st_shared(&stage.scale[index], x.scale[i]);
        }
    }
};

// A lane's row of the four matrices that `ldmatrix` loads at once: the k-steps of a k-block for eight tokens.
struct ByteCursor {
    u32 offset;

    QG_DEVICE ByteCursor of_lane(u32 lane) { return {ByteStage::place(lane % 8, lane / 8)}; }

    // The B operands of token tile `tt`, one a k-step.
    QG_DEVICE void load(const ByteCursor& cursor, const ByteStage& stage, u32 tt, u32 (&b)[4]) {
        ldmatrix_x4(b, stage.codes + cursor.offset + tt * 8 * X_ROW);
    }
};
