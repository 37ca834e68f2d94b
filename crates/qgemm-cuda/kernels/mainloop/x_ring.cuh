// X of a CTA's tokens in shared memory, 64 columns a stage, as `ldmatrix` reads it: a row of 128 bytes for each token,
// in natural order. The 16-byte chunks of a row are swizzled: chunk c of token r lies at c ^ (r % 8), so that the eight
// rows of a matrix lie in different banks. It is TMA's 128-byte swizzle.
#pragma once
#include "atoms/ldmatrix.cuh"
#include "mainloop/mma_operand.cuh"

// Bytes of a token's row in a stage, and of a 16-byte chunk of it.
constexpr u32 X_ROW_BYTES = K_BLOCK * 2;
constexpr u32 X_CHUNK_BYTES = 16;
constexpr u32 X_CHUNK_K = X_CHUNK_BYTES / 2;
constexpr u32 X_ROW_CHUNKS = X_ROW_BYTES / X_CHUNK_BYTES;
constexpr u32 X_STAGE_BYTES = QG_X_ROWS * X_ROW_BYTES;

// Stages lie at multiples of 1024 bytes, first in shared memory: TMA's swizzle depends on the address.
struct XStage {
    alignas(16) u8 bytes[X_STAGE_BYTES];

    QG_DEVICE u8* at(XStage& stage, u32 token, u32 chunk) {
        return stage.bytes + token * X_ROW_BYTES + (chunk ^ token % 8) * X_CHUNK_BYTES;
    }
};

// A lane's rows of the matrices that `ldmatrix` loads from a stage. Matrices 0 and 1 are the two halves of a k-step's
// columns for eight tokens, matrices 2 and 3 the same for the next eight tokens.
struct XCursor {
    u32 offset;

    QG_DEVICE XCursor of_lane(u32 lane) {
        const u32 token = lane / 16 * 8 + lane % 8;
        return {token * X_ROW_BYTES + (lane / 8 % 2 ^ lane % 8) * X_CHUNK_BYTES};
    }

    // Here matrices 2 and 3 are the next k-step's, for the same eight tokens.
    QG_DEVICE XCursor of_lane_in_k_steps(u32 lane) {
        if constexpr (QG_X_ROWS == 1) return {lane / 8 * X_CHUNK_BYTES};
        return {lane % 8 * X_ROW_BYTES + (lane / 8 ^ lane % 8) * X_CHUNK_BYTES};
    }

    QG_DEVICE u32 row_of(const XCursor& cursor, const XStage& stage, u32 k_step) {
        return shared_address(stage.bytes) + (cursor.offset ^ k_step * 2 * X_CHUNK_BYTES);
    }

    // The B operands of MMA k-step `k_step` for token tiles `tt` and `tt` + 1.
    QG_DEVICE void load_two_tiles(const XCursor& cursor, const XStage& stage, u32 k_step, u32 tt, u32 (&b)[2][2]) {
        u32 words[4];
        ldmatrix_x4(words, row_of(cursor, stage, k_step) + tt * MMA_TOKENS * X_ROW_BYTES);
        b[0][0] = words[0], b[0][1] = words[1], b[1][0] = words[2], b[1][1] = words[3];
    }
    // The B operands of MMA k-steps `k_step` and `k_step` + 1 for token tile `tt`, with a cursor from
    // `of_lane_in_k_steps`.
    QG_DEVICE void load_two_k_steps(const XCursor& cursor, const XStage& stage, u32 k_step, u32 tt, u32 (&b)[2][2]) {
        u32 words[4];
        ldmatrix_x4(words, row_of(cursor, stage, k_step) + tt * MMA_TOKENS * X_ROW_BYTES);
        b[0][0] = words[0], b[0][1] = words[1], b[1][0] = words[2], b[1][1] = words[3];
    }
};
