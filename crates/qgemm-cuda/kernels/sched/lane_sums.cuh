// Warp prefix sum.
#pragma once
#include "atoms/launch.cuh"
#include "atoms/warp.cuh"

QG_DEVICE u32 of_lane(u32 value, u32 lane) {
    return shfl_idx_u32(value, lane);
}
QG_DEVICE u64 of_lane(u64 value, u32 lane) {
    const u32 low = shfl_idx_u32((u32)value, lane), high = shfl_idx_u32((u32)(value >> 32), lane);
    return (u64)high << 32 | low;
}

// Inclusive prefix sum over the first LANES lanes; the last of
// them has the total.
template <u32 LANES = 32, class T>
QG_DEVICE T sum_up_to_lane(T value) {
    const u32 lane = thread_index() % 32;
#pragma unroll
    for (u32 step = 1; step < LANES; step *= 2) {
        const T other = of_lane(value, lane >= step ? lane - step : lane);
        if (lane >= step) value += other;
    }
    return value;
}
