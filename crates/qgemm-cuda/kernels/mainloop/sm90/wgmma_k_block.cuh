// The product of a warpgroup's instructions: 64 rows of W, of which each warp dequantizes 16 in registers, and all
// tokens of the CTA, which the instruction reads from shared memory. Weights are rounded once to the type of X.
#pragma once
#include "atoms/wgmma.cuh"
#include "mainloop/warp_tile.cuh"

// The operands of one row tile and k-block. Their registers belong to the instructions until these are complete.
struct KBlockOperands {
    u32 a[K_STEPS][4];
};

// Begins acc += W · X of a row tile and the first TOKENS tokens over k-block `k_block` of the k-tile. Code that touches the accumulators or the
// operands next must wait first.
template <u32 TOKENS>
QG_DEVICE void start_k_block(float (&acc)[TOKEN_TILES][4], KBlockOperands& operands, const KTile& k_tile, u32 k_block,
                             const XStage& x) {
    [[maybe_unused]] RowFactor factor[2];
#pragma unroll
    for (u32 k_step = 0; k_step < K_STEPS; k_step++) {
        rounded_weights(operands.a[k_step], factor, k_tile, k_block, k_step);
        wgmma_fence_operand(operands.a[k_step]);
    }
    float(&d)[TOKENS / 2] = reinterpret_cast<float(&)[TOKENS / 2]>(acc);
    const u64 columns = wgmma_descriptor_128b(x.bytes);
    wgmma_fence();
#pragma unroll
    for (u32 k_step = 0; k_step < K_STEPS; k_step++) {
        const u64 at = columns + (k_step * K_STEP * 2 >> 4);
#if QG_X_DTYPE == 1
        wgmma_k16_f16<TOKENS>(d, operands.a[k_step], at);
#else
        wgmma_k16_bf16<TOKENS>(d, operands.a[k_step], at);
#endif
    }
    wgmma_commit_group();
}
