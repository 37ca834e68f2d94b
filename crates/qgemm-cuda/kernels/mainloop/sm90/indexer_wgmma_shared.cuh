// Indexer scores with FP8 WGMMA,
// both operands in shared memory.
#pragma once
#include "atoms/wgmma_fp8_shared.cuh"
#include "mainloop/sm90/indexer_wgmma.cuh"

// D = keys · heads over all features,
// for 64 keys and 64 columns.
QG_DEVICE void multiply_shared(float (&d)[ACCUMULATORS], u64 keys, u64 columns) {
    // Descriptor step within rows of 128 bytes.
    constexpr u32 STEP = 32 >> 4;
    wgmma_shared_k32_e4m3<COLUMNS, 0>(d, keys, columns);
#pragma unroll
    for (u32 step = 1; step < STEPS; step++) wgmma_shared_k32_e4m3<COLUMNS, 1>(d, keys + step * STEP, columns + step * STEP);
    wgmma_commit_group();
}
