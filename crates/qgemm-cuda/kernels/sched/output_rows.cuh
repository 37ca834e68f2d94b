// How many rows of W there are outputs of.
#pragma once
#include "sched/params.cuh"

// Two a feature of a gated pair.
QG_DEVICE u32 rows_of_outputs(const GemmParams& p) {
    return p.shape.flags & QG_FLAG_GATED ? 2 * p.shape.out_features : p.shape.out_features;
}
