// Attention: results of parts of the keys in the
// workspace, for a launch that combines them.
#pragma once
#include "attention/problem.cuh"

// Split-KV partial result: {row_max, row_sum,
// unused, unused}, then the accumulators [v_dim].
QG_DEVICE float* partial_result(const AttentionParams& p, u64 token, u32 head, u32 part) {
    const u64 row = (token * p.shape.heads + head) * p.at.parts + part;
    return reinterpret_cast<float*>(p.at.workspace) + row * (p.shape.v_dim + 4);
}
