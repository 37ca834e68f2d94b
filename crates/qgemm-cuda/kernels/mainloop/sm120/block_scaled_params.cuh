// Parameters of block-scaled GEMM.
#pragma once
#include "mainloop/tma_params.cuh"
#include "sched/params.cuh"

struct BlockScaledParams {
    // `x` holds codes. FP4 has two a byte, lower column
    // in the low nibble.
    // `x_row` counts bytes.
    GemmParams gemm;
    u64 x_scales;      // Scales of X, one byte per QG_SUB_BLOCK columns.
    u64 x_scale_row;   // Byte stride of rows of scales.
    u64 x_factors;     // f32 factors of X, or 0.
    u64 x_factor_row;  // Byte stride of factors; 0 for one per-tensor factor.
};

struct TmaBlockScaledParams {
    BlockScaledParams x;
    // Tensor maps of X's codes, [tokens][bytes], 64-byte swizzle.
    // Boxes have 64 bytes and a whole token tile.
    // The tail map has the size of a partial last token tile.
    TensorMap x_map, x_tail_map;
};
