// The parameter of products on block-scaled instructions.
#pragma once
#include "sched/params.cuh"

struct BlockScaledParams {
    // `x` holds codes; of FP4 two in a byte, the lower column in the low nibble. `x_row` counts bytes.
    GemmParams gemm;
    u64 x_scales;     // Scales of X, a byte for QG_SUB_BLOCK columns.
    u64 x_scale_row;  // Bytes from one row of scales to the next.
    u64 x_given;      // A factor of all of X in f32, or 0.
};
