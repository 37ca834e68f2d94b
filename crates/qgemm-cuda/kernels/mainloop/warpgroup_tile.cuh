// The product of a warpgroup: ROW_TILES x 64 rows of W, of which each of its warps makes ROW_TILES x 16 in registers, and
// all tokens of the block, which the instruction reads from shared memory. Weights are rounded once to the type of X.
//
// The registers of a step belong to the instruction until it is done, so steps take turns: while the instructions of the
// last few run, the warp makes the weights of the next.
#pragma once
#include "atoms/wgmma.cuh"
#include "mainloop/warp_tile.cuh"

// Steps whose instructions are issued and waited for together.
constexpr u32 BATCH = QG_BATCH;
constexpr u32 BATCHES = STEPS / BATCH;

// Operands of the steps of a chunk, or of as many as are under way.
struct StepOperands {
    u32 a[STEPS][ROW_TILES][4];
};

QG_DEVICE void wgmma_step(float (&d)[TOKEN_TILES * 4], const u32 (&a)[4], u64 x) {
#if QG_X_DTYPE == 1
    wgmma_k16_f16<QG_TILE_M>(d, a, x);
#else
    wgmma_k16_bf16<QG_TILE_M>(d, a, x);
#endif
}

// sums += W · X over chunk `chunk` of the slabs, which begins while the instructions of the chunk before still run.
// `chunk_before_done` is called when these are done.
template <class Done>
QG_DEVICE void multiply_chunk(Sums& sums, StepOperands& operands, const Slab (&slabs)[ROW_TILES], u32 chunk,
                              const XStage& x, Done chunk_before_done) {
    [[maybe_unused]] RowFactor factor[ROW_TILES][2];
    const u64 columns = wgmma_descriptor_128b(x.bytes);
#pragma unroll
    for (u32 batch = 0; batch < BATCHES; batch++) {
        // The instructions that read these registers last are done; those of all other batches may run.
        wgmma_wait_group<BATCHES - 1>();
        if (batch + 1 == BATCHES) chunk_before_done();
#pragma unroll
        for (u32 step = batch * BATCH; step < (batch + 1) * BATCH; step++)
#pragma unroll
            for (u32 rt = 0; rt < ROW_TILES; rt++)
                rounded_weights(operands.a[step][rt], factor[rt], slabs[rt], chunk, step);
        wgmma_fence();
#pragma unroll
        for (u32 step = batch * BATCH; step < (batch + 1) * BATCH; step++)
#pragma unroll
            for (u32 rt = 0; rt < ROW_TILES; rt++)
                wgmma_step(reinterpret_cast<float(&)[TOKEN_TILES * 4]>(sums.value[rt]), operands.a[step][rt],
                           columns + (step * STEP_K * 2 >> 4));
        wgmma_commit_group();
    }
}
