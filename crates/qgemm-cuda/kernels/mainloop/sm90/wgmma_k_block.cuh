// The product of a warpgroup's instructions: 64 rows of W, of which each warp dequantizes 16 in registers, and all
// tokens of the CTA, which the instruction reads from shared memory. Weights are rounded once to the type of X.
#pragma once
#include "atoms/wgmma.cuh"
#include "mainloop/warp_tile.cuh"

// Parts of a k-block that are begun one after the other. Beside two row tiles of more than 128 tokens there are no registers for the
// operands of whole k-blocks.
constexpr u32 PARTS = ROW_TILES > 1 && QG_TILE_M > 128 ? 2 : 1, PART_STEPS = K_STEPS / PARTS;

// The operands of one row tile and part of a k-block. Their registers belong to the instructions until these are complete.
struct KBlockOperands {
    u32 a[PART_STEPS][4];
};

// Begins acc += W · X of a row tile and the first TOKENS tokens over part `part` of k-block `k_block` of the k-tile. Code that touches the
// accumulators or the operands next must wait first.
template <u32 TOKENS>
QG_DEVICE void start_k_block(float (&acc)[TOKEN_TILES][4], KBlockOperands& operands, const KTile& k_tile, u32 k_block,
                             u32 part, const XStage& x) {
    [[maybe_unused]] RowFactor factor[2];
    if constexpr (PARTS > 1 && Operands::HAS_SCALE) {
        // Of a sub-block that began in an earlier part.
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
