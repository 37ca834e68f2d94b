// X stages in shared memory for `ldmatrix`.
// A stage has 64 columns: 128 bytes a token, in natural order.
// 16-byte chunks are swizzled: chunk c of token r is at c ^ (r
// % 8), TMA's 128-byte swizzle.
// The eight rows of a matrix then use different banks.
#pragma once
#include "atoms/ldmatrix.cuh"
#include "mainloop/mma_operand.cuh"

// Bytes of a token's row in a stage, and of a 16-byte chunk.
constexpr u32 X_ROW_BYTES = K_BLOCK * 2;
constexpr u32 X_CHUNK_BYTES = 16;
constexpr u32 X_CHUNK_K = X_CHUNK_BYTES / 2;
constexpr u32 X_ROW_CHUNKS = X_ROW_BYTES / X_CHUNK_BYTES;
constexpr u32 X_STAGE_BYTES = QG_X_ROWS * X_ROW_BYTES;

// TMA's swizzle depends on the address.
// Stages are 1024-byte aligned, so X is first in shared memory.
struct XStage {
    alignas(16) u8 bytes[X_STAGE_BYTES];  // [token][column], swizzled

    QG_DEVICE u8* at(XStage& stage, u32 token, u32 chunk) {
        return stage.bytes + token * X_ROW_BYTES + (chunk ^ token % 8) * X_CHUNK_BYTES;
    }
};

// The lane's `ldmatrix` row address.
// Matrices 0 and 1: the halves of a k-step, eight tokens.
// Matrices 2 and 3: the next eight tokens.
struct XCursor {
    u32 offset;

    QG_DEVICE XCursor of_lane(u32 lane) {
        const u32 token = lane / 16 * 8 + lane % 8;
        return {token * X_ROW_BYTES + (lane / 8 % 2 ^ lane % 8) * X_CHUNK_BYTES};
    }

    // Variant: matrices 2 and 3 are the next k-step, for the
    // same eight tokens.
    QG_DEVICE XCursor of_lane_in_k_steps(u32 lane) {
        if constexpr (QG_X_ROWS == 1) return {lane / 8 * X_CHUNK_BYTES};
        return {lane % 8 * X_ROW_BYTES + (lane / 8 ^ lane % 8) * X_CHUNK_BYTES};
    }

    QG_DEVICE u32 row_of(const XCursor& cursor, const XStage& stage, u32 k_step) {
        return shared_address(stage.bytes) + (cursor.offset ^ k_step * 2 * X_CHUNK_BYTES);
    }

    // B operands of k-step `k_step`, token tiles `tt` and `tt` + 1.
    QG_DEVICE void load_two_tiles(const XCursor& cursor, const XStage& stage, u32 k_step, u32 tt, u32 (&b)[2][2]) {
        u32 words[4];
        ldmatrix_x4(words, row_of(cursor, stage, k_step) + tt * MMA_TOKENS * X_ROW_BYTES);
        b[0][0] = words[0], b[0][1] = words[1], b[1][0] = words[2], b[1][1] = words[3];
    }
    // B operands of k-steps `k_step` and `k_step` + 1, tile `tt`.
    // The cursor comes from `of_lane_in_k_steps`.
    QG_DEVICE void load_two_k_steps(const XCursor& cursor, const XStage& stage, u32 k_step, u32 tt, u32 (&b)[2][2]) {
        u32 words[4];
        ldmatrix_x4(words, row_of(cursor, stage, k_step) + tt * MMA_TOKENS * X_ROW_BYTES);
        b[0][0] = words[0], b[0][1] = words[1], b[1][0] = words[2], b[1][1] = words[3];
    }
};
