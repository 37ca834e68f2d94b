// X in signed bytes, a k-block of 64 columns or two a stage, with the scales of its blocks: 64 bytes a token and k-block, of which
// every 16 hold the columns of a k-step in the order of W's bytes, 0, 8, 1, 9, 2, 10, ... A row's 16-byte chunks are swizzled, chunk c
// of token r lies at c ^ r % 8, or at c ^ (r / 2 % 4) in rows of four chunks, so that the eight rows that `ldmatrix` reads at once lie
// in different banks.
//
// Copies bring bytes in their natural order; the thread that copied 16 of them changes it in place.
#pragma once
#include "atoms/ldmatrix.cuh"
#include "atoms/memory.cuh"
#include "atoms/warp.cuh"
#include "mainloop/signed_byte_sums.cuh"

constexpr u32 STAGE_K_BLOCKS = QG_STAGE_K_BLOCKS, STAGE_K = STAGE_K_BLOCKS * K_BLOCK;
constexpr u32 K_BLOCK_CHUNKS = K_BLOCK / X_CHUNK, X_CHUNKS = STAGE_K / X_CHUNK;
static_assert(STAGE_K_BLOCKS <= 2, "rows of four chunks, or of eight");
// Scales of a token in a k-block.
constexpr u32 X_SCALES = QG_X_BLOCK_SCALES ? K_BLOCK / X_SCALE_COLUMNS : 0;

// Words of a sum of X for minimums, of the four that a k-block has, as many as half of the columns of an operand of tf32. A number is the
// sum of two of tf32, but for the lowest two of its bits; where there are four sums, the lower parts are four more words.
constexpr u32 SUM_WORDS = K_BLOCK_CHUNKS / SUMS, SUM_PASSES = SUM_WORDS == 1 ? 2 : 1;

// The part of a number that tf32 holds.
QG_DEVICE float tf32_part(float value) {
    return bits_to_f32(f32_to_bits(value) & 0xffffe000u);
}

struct ByteStage {
    alignas(16) u8 codes[QG_TILE_M * STAGE_K];
    alignas(16) float scale[STAGE_K_BLOCKS][X_SCALES == 0 ? 4 : QG_TILE_M * X_SCALES];
    // For minimums: sums of codes times their scale (`store_sum`).
    alignas(16) float sum[STAGE_K_BLOCKS][SignedBytes::HAS_MIN ? SUM_PASSES * QG_TILE_M * K_BLOCK_CHUNKS : 4];

    QG_DEVICE u32 place(u32 token, u32 chunk) {
        return token * STAGE_K + (chunk ^ (STAGE_K_BLOCKS == 2 ? token : token / 2) % X_CHUNKS) * X_CHUNK;
    }
    // That of the columns of chunk `chunk`.
    QG_DEVICE float* scale_of(ByteStage& stage, u32 token, u32 chunk) {
        return &stage.scale[chunk / K_BLOCK_CHUNKS][token * X_SCALES + chunk % K_BLOCK_CHUNKS / 2];
    }
};

// 16-byte chunks of a stage, and how many of them a thread has.
constexpr u32 STAGE_CHUNKS = QG_TILE_M * X_CHUNKS;
constexpr u32 CHUNK_TURNS = (STAGE_CHUNKS + QG_THREADS - 1) / QG_THREADS;
// Tokens from a thread's chunk to its next.
constexpr u32 CHUNK_TURN_TOKENS = QG_THREADS / X_CHUNKS;

QG_DEVICE bool has_chunk(u32 turn, u32 thread) {
    return STAGE_CHUNKS % QG_THREADS == 0 || turn * QG_THREADS + thread < STAGE_CHUNKS;
}

// Stores a part, the upper or the lower, of what the codes of SUM_K columns come to times their scale, `sum` of them in a chunk of a
// token: the upper in the first word of a sum.
QG_DEVICE void store_sum(ByteStage& stage, float sum, u32 token, u32 chunk) {
#pragma unroll
    for (u32 chunks = 1; chunks < SUM_K / X_CHUNK; chunks *= 2) sum += shfl_xor(sum, chunks);
    if constexpr (X_SCALES > 0) {
        // The thread of an even chunk copied the scale.
        float scale = 0;
        if (chunk % 2 == 0) scale = ld_shared(ByteStage::scale_of(stage, token, chunk));
        sum *= scale + shfl_xor(scale, 1);
    }
    const float upper = tf32_part(sum);
    float* to = &stage.sum[chunk / K_BLOCK_CHUNKS][token * K_BLOCK_CHUNKS + chunk % K_BLOCK_CHUNKS];
    st_shared(to, chunk % SUM_WORDS == 0 ? upper : sum - upper);
    if constexpr (SUM_PASSES == 2) st_shared(to + QG_TILE_M * K_BLOCK_CHUNKS, sum - upper);
}

// Gives the thread's chunks of a stage the order of W's bytes, and adds them up.
QG_DEVICE void order_bytes(ByteStage& stage, u32 thread) {
    const u32 chunk = thread % X_CHUNKS;
#pragma unroll
    for (u32 i = 0; i < CHUNK_TURNS; i++) {
        if (!has_chunk(i, thread)) continue;
        const u32 token = thread / X_CHUNKS + i * CHUNK_TURN_TOKENS;
        u32x4* at = reinterpret_cast<u32x4*>(stage.codes + ByteStage::place(token, chunk));
        const u32x4 v = ld_shared(at);
        if constexpr (SignedBytes::HAS_MIN) store_sum(stage, (float)sum_of_codes(v), token, chunk);
        st_shared(at, in_order_of_w(v));
    }
}

// A lane's row of the four matrices that `ldmatrix` loads at once: the k-steps of a k-block for eight tokens.
struct ByteCursor {
    u32 offset;

    QG_DEVICE ByteCursor of_lane(u32 lane) { return {ByteStage::place(lane % 8, lane / 8)}; }

    // The B operands of token tile `tt` in k-block `k_block` of the stage, one a k-step. `zero` is added to the address.
    QG_DEVICE void load(const ByteCursor& cursor, const ByteStage& stage, u32 k_block, u32 tt, u32 zero, u32 (&b)[4]) {
        ldmatrix_x4(b, shared_address(stage.codes) + (cursor.offset ^ k_block * K_BLOCK) + tt * 8 * STAGE_K + zero);
    }
};
