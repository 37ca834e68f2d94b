// X in signed bytes, a k-block of 64 columns a stage, with the scales of its blocks: 64 bytes a token, of which every 16 hold the
// columns of a k-step in the order of W's bytes, 0, 8, 1, 9, 2, 10, ... A row's 16-byte chunks are swizzled, chunk c of token r lies
// at c ^ (r / 2 % 4), so that the eight rows that `ldmatrix` reads at once lie in different banks.
//
// Copies bring bytes in their natural order; the thread that copied 16 of them changes it in place.
#pragma once
#include "atoms/ldmatrix.cuh"
#include "atoms/memory.cuh"
#include "dequant/signed_bytes.cuh"
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
    // Of the codes of every chunk, for minimums.
    alignas(16) float sum[SignedBytes::HAS_MIN ? QG_TILE_M * X_CHUNKS : 4];

    QG_DEVICE u32 place(u32 token, u32 chunk) { return token * X_ROW + (chunk ^ token / 2 % 4) * X_CHUNK; }
};

// 16-byte chunks and scales of a stage, and how many of them a thread has.
constexpr u32 STAGE_CHUNKS = QG_TILE_M * X_CHUNKS, STAGE_SCALES = QG_TILE_M * X_SCALES;
constexpr u32 CHUNK_TURNS = (STAGE_CHUNKS + QG_THREADS - 1) / QG_THREADS;
constexpr u32 SCALE_TURNS = (STAGE_SCALES + QG_THREADS - 1) / QG_THREADS;
// Tokens from a thread's chunk, and scale, to its next.
constexpr u32 CHUNK_TURN_TOKENS = QG_THREADS / X_CHUNKS, SCALE_TURN_TOKENS = QG_THREADS / 2;

QG_DEVICE bool has_chunk(u32 turn, u32 thread) {
    return STAGE_CHUNKS % QG_THREADS == 0 || turn * QG_THREADS + thread < STAGE_CHUNKS;
}
QG_DEVICE bool has_scale(u32 turn, u32 thread) {
    return STAGE_SCALES % QG_THREADS == 0 || turn * QG_THREADS + thread < STAGE_SCALES;
}

// Gives the thread's chunks of a stage the order of W's bytes, and adds them up.
QG_DEVICE void order_bytes(ByteStage& stage, u32 thread) {
#pragma unroll
    for (u32 i = 0; i < CHUNK_TURNS; i++) {
        if (!has_chunk(i, thread)) continue;
        u32x4* at = reinterpret_cast<u32x4*>(
            stage.codes + ByteStage::place(thread / X_CHUNKS + i * CHUNK_TURN_TOKENS, thread % X_CHUNKS));
        const u32x4 v = ld_shared(at);
        if constexpr (SignedBytes::HAS_MIN) {
            i32 sum = dp4a((i32)v.x, (i32)EACH_BYTE, dp4a((i32)v.y, (i32)EACH_BYTE, 0));
            sum = dp4a((i32)v.z, (i32)EACH_BYTE, dp4a((i32)v.w, (i32)EACH_BYTE, sum));
            st_shared(&stage.sum[i * QG_THREADS + thread], (float)sum);
        }
        st_shared(at, u32x4{prmt(v.x, v.z, 0x5140), prmt(v.x, v.z, 0x7362), prmt(v.y, v.w, 0x5140),
                            prmt(v.y, v.w, 0x7362)});
    }
}

// A lane's row of the four matrices that `ldmatrix` loads at once: the k-steps of a k-block for eight tokens.
struct ByteCursor {
    u32 offset;

    QG_DEVICE ByteCursor of_lane(u32 lane) { return {ByteStage::place(lane % 8, lane / 8)}; }

    // The B operands of token tile `tt`, one a k-step. `zero` is added to the address.
    QG_DEVICE void load(const ByteCursor& cursor, const ByteStage& stage, u32 tt, u32 zero, u32 (&b)[4]) {
        ldmatrix_x4(b, shared_address(stage.codes) + cursor.offset + tt * 8 * X_ROW + zero);
    }
};
