// X ring of signed bytes: one or two k-blocks of 64 columns a
// stage, with block scales. A k-block has 64 bytes a token.
// Every 16 bytes hold the columns of a k-step in W's byte
// order, 0, 8, 1, 9, 2, 10, ….
// 16-byte chunks are swizzled: chunk c of token r is at c ^ r
// % 8, or at c ^ (r / 2 % 4) in rows of four chunks.
// The eight rows of an `ldmatrix` then use different banks.
//
// Copies keep the natural byte order.
// The thread that copied a chunk permutes it in place.
#pragma once
#include "atoms/ldmatrix.cuh"
#include "atoms/memory.cuh"
#include "atoms/warp.cuh"
#include "mainloop/signed_byte_sums.cuh"

constexpr u32 STAGE_K_BLOCKS = QG_STAGE_K_BLOCKS, STAGE_K = STAGE_K_BLOCKS * K_BLOCK;
constexpr u32 K_BLOCK_CHUNKS = K_BLOCK / X_CHUNK, X_CHUNKS = STAGE_K / X_CHUNK;
static_assert(STAGE_K_BLOCKS <= 2, "rows of four chunks, or of eight");
// Scales of a token per k-block.
constexpr u32 X_SCALES = QG_X_BLOCK_SCALES ? K_BLOCK / X_SCALE_COLUMNS : 0;

// Words per X sum for the minimums.
// A k-block has four words, half of the columns
// of a tf32 operand.
// A number is the sum of two tf32 parts.
// Its two lowest bits are lost.
// With four sums the lower parts take four more words.
constexpr u32 SUM_WORDS = K_BLOCK_CHUNKS / SUMS, SUM_PASSES = SUM_WORDS == 1 ? 2 : 1;

// The tf32 part of a number.
QG_DEVICE float tf32_part(float value) {
    return bits_to_f32(f32_to_bits(value) & 0xffffe000u);
}

struct ByteStage {
    alignas(16) u8 codes[QG_TILE_M * STAGE_K];  // [token][column], swizzled
    alignas(16) float scale[STAGE_K_BLOCKS][X_SCALES == 0 ? 4 : QG_TILE_M * X_SCALES];  // [k-block][token][scale]
    // Scaled sums of codes, for minimums (`store_sum`):
    // [k-block][pass][token][word].
    alignas(16) float sum[STAGE_K_BLOCKS][SignedBytes::HAS_MIN ? SUM_PASSES * QG_TILE_M * K_BLOCK_CHUNKS : 4];

    QG_DEVICE u32 place(u32 token, u32 chunk) {
        return token * STAGE_K + (chunk ^ (STAGE_K_BLOCKS == 2 ? token : token / 2) % X_CHUNKS) * X_CHUNK;
    }
    // Scale of the columns of chunk `chunk`.
    QG_DEVICE float* scale_of(ByteStage& stage, u32 token, u32 chunk) {
        return &stage.scale[chunk / K_BLOCK_CHUNKS][token * X_SCALES + chunk % K_BLOCK_CHUNKS / 2];
    }
};

// 16-byte chunks of a stage, and chunks per thread.
constexpr u32 STAGE_CHUNKS = QG_TILE_M * X_CHUNKS;
constexpr u32 CHUNK_TURNS = (STAGE_CHUNKS + QG_THREADS - 1) / QG_THREADS;
// Token stride of a thread's chunks.
constexpr u32 CHUNK_TURN_TOKENS = QG_THREADS / X_CHUNKS;

QG_DEVICE bool has_chunk(u32 turn, u32 thread) {
    return STAGE_CHUNKS % QG_THREADS == 0 || turn * QG_THREADS + thread < STAGE_CHUNKS;
}

// Stores the upper or lower tf32 part of a scaled X sum over
// SUM_K columns. `sum` is the chunk's contribution.
// The first word of a sum is the upper part.
QG_DEVICE void store_sum(ByteStage& stage, float sum, u32 token, u32 chunk) {
#pragma unroll
    for (u32 chunks = 1; chunks < SUM_K / X_CHUNK; chunks *= 2) sum += shfl_xor(sum, chunks);
    if constexpr (X_SCALES > 0) {
        // The even chunk's thread copied the scale.
        float scale = 0;
        if (chunk % 2 == 0) scale = ld_shared(ByteStage::scale_of(stage, token, chunk));
        sum *= scale + shfl_xor(scale, 1);
    }
    const float upper = tf32_part(sum);
    float* to = &stage.sum[chunk / K_BLOCK_CHUNKS][token * K_BLOCK_CHUNKS + chunk % K_BLOCK_CHUNKS];
    st_shared(to, chunk % SUM_WORDS == 0 ? upper : sum - upper);
    if constexpr (SUM_PASSES == 2) st_shared(to + QG_TILE_M * K_BLOCK_CHUNKS, sum - upper);
}

// Permutes the thread's chunks to W's byte order and sums them.
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

// The lane's row address for an `ldmatrix` of four matrices:
// the k-steps of a k-block for eight tokens.
struct ByteCursor {
    u32 offset;

    QG_DEVICE ByteCursor of_lane(u32 lane) { return {ByteStage::place(lane % 8, lane / 8)}; }

    // B operands of token tile `tt` in `k_block`, one per k-step.
    // `zero` is added to the address.
    QG_DEVICE void load(const ByteCursor& cursor, const ByteStage& stage, u32 k_block, u32 tt, u32 zero, u32 (&b)[4]) {
        ldmatrix_x4(b, shared_address(stage.codes) + (cursor.offset ^ k_block * K_BLOCK) + tt * 8 * STAGE_K + zero);
    }
};
