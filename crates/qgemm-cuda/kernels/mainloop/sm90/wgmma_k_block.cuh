// wgmma over a k-block: 64 rows of W and all tokens.
// Each warp dequantizes 16 rows in registers; X is read
// from shared memory.
// Weights are rounded once to the type of X.
#pragma once
#include "atoms/wgmma.cuh"
#include "mainloop/warp_tile.cuh"

// Parts of a k-block, issued one after another.
// Two row tiles with more than 128 tokens leave no registers
// for the operands of a whole k-block.
constexpr u32 PARTS = ROW_TILES > 1 && QG_TILE_M > 128 ? 2 : 1, PART_STEPS = K_STEPS / PARTS;

// Operands of a row tile and part of a k-block.
// wgmma owns these registers until it completes.
struct KBlockOperands {
    u32 a[PART_STEPS][4];
};

// Starts acc += W · X of a row tile for the first TOKENS
// tokens, over part `part` of k-block `k_block`.
// Wait before the accumulators or operands are touched again.
template <u32 TOKENS>
QG_DEVICE void start_k_block(float (&acc)[TOKEN_TILES][4], KBlockOperands& operands, const KTile& k_tile, u32 k_block,
                             u32 part, const XStage& x) {
    [[maybe_unused]] RowFactor factor[2];
    if constexpr (PARTS > 1 && Operands::HAS_SCALE) {
        // Scale of a sub-block that began in an earlier part.
#pragma unroll
        for (u32 i = 0; i < 2; i++)
            factor[i] = RowFactor::of(k_tile, i, sub_block_of(k_block, part * PART_STEPS * K_STEP / PARTIAL_K));
    }
#pragma unroll
    for (u32 step = 0; step < PART_STEPS; step++) {
        rounded_weights(operands.a[step], factor, k_tile, k_block, part * PART_STEPS + step);
        wgmma_fence_operand(operands.a[step]);
    }
    float(&d)[TOKENS / 2] = reinterpret_cast<float(&)[TOKENS / 2]>(acc);
    const u64 columns = wgmma_descriptor_128b(x.bytes);
    wgmma_fence();
#pragma unroll
    for (u32 step = 0; step < PART_STEPS; step++) {
        const u64 at = columns + ((part * PART_STEPS + step) * K_STEP * 2 >> 4);
#if QG_X_DTYPE == 1
        wgmma_k16_f16<TOKENS>(d, operands.a[step], at);
#else
        wgmma_k16_bf16<TOKENS>(d, operands.a[step], at);
#endif
    }
    wgmma_commit_group();
}
