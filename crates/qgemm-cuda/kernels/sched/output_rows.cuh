// Number of rows of W that have outputs.
#pragma once
#include "sched/params.cuh"

// A gated pair has two rows per output feature.
QG_DEVICE u32 rows_of_outputs(const GemmParams& p) {
    return p.shape.flags & QG_FLAG_GATED ? 2 * p.shape.out_features : p.shape.out_features;
}
