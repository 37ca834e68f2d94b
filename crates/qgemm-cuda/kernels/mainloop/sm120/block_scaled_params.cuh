// The parameter of products on block-scaled instructions.
#pragma once
#include "mainloop/tma_params.cuh"
#include "sched/params.cuh"

struct BlockScaledParams {
    // `x` holds codes; of FP4 two in a byte, the lower column in the low nibble. `x_row` counts bytes.
    GemmParams gemm;
    u64 x_scales;      // Scales of X, a byte for QG_SUB_BLOCK columns.
    u64 x_scale_row;   // Bytes from one row of scales to the next.
    u64 x_factors;     // Factors of X in f32, or 0.
    u64 x_factor_row;  // Bytes from one token's factor to the next: 0 where all of X has one.
};

struct TmaBlockScaledParams {
    BlockScaledParams x;
    // Maps of X as codes: [tokens][bytes], boxes of 64 bytes and a whole token tile, and of the last token tile where that is no whole
    // one, 64-byte swizzle.
    TensorMap x_map, x_tail_map;
};
