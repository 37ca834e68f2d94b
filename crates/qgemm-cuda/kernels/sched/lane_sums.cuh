// Warp prefix sum.
#pragma once
#include "atoms/launch.cuh"
#include "atoms/warp.cuh"

// Inclusive prefix sum; lane 31 has the total.
QG_DEVICE u32 sum_up_to_lane(u32 value) {
    const u32 lane = thread_index() % 32;
#pragma unroll
    for (u32 step = 1; step < 32; step *= 2) {
        const u32 other = shfl_idx_u32(value, lane >= step ? lane - step : lane);
        if (lane >= step) value += other;
    }
    return value;
}
