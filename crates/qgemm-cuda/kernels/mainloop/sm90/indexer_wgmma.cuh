// Products of E4M3 keys, rows of `wgmma` in registers, with the heads of queries, columns in shared memory, and what they become.
#pragma once
#include "atoms/relu.cuh"
#include "atoms/relu_twice.cuh"
#include "atoms/warp.cuh"
#include "atoms/wgmma_fp8.cuh"

constexpr u32 FEATURES = 128, STEPS = FEATURES / 32;
// Columns of an instruction, and queries that have them.
constexpr u32 COLUMNS = 64, COLUMN_QUERIES = COLUMNS / QG_HEADS;
static_assert(QG_HEADS == 32 || QG_HEADS == 64, "columns are whole queries");
// What a lane has of 64 columns: of two rows.
constexpr u32 ACCUMULATORS = COLUMNS / 2;

// A lane's keys, as operands: row g of its warp's sixteen, and row g + 8.
struct LaneKeys {
    u32 a[STEPS][4];
};

// D = keys · heads over all features, for 64 columns.
QG_DEVICE void multiply(float (&d)[ACCUMULATORS], const LaneKeys& keys, u64 columns) {
    // From a step to the next within rows of 128 bytes.
    constexpr u32 STEP = 32 >> 4;
    wgmma_k32_e4m3_e4m3<COLUMNS, 0>(d, keys.a[0], columns);
#pragma unroll
    for (u32 step = 1; step < STEPS; step++) wgmma_k32_e4m3_e4m3<COLUMNS, 1>(d, keys.a[step], columns + step * STEP);
    wgmma_commit_group();
}

// What a lane's two rows have of each query of 64 columns; the second row's is doubled (`row_factor`).
struct Sums {
    float value[COLUMN_QUERIES][2];

    QG_DEVICE Sums of(const float (&d)[ACCUMULATORS], const float* weights, u32 lane) {
        Sums sums = {};
#pragma unroll
        for (u32 j = 0; j < COLUMNS / 8; j++) {
            // Eight bytes of four lanes pass at once for all; of sixteen a quarter would.
            const f32x2 weight = ld_shared(reinterpret_cast<const f32x2*>(weights + j * 8 + lane % 4 * 2));
            float(&own)[2] = sums.value[j * 8 / QG_HEADS];
            // One row by comparisons, one by additions: neither pipe is waited for.
            own[0] = fma_f32(weight.x, relu(d[j * 4]), own[0]);
            own[0] = fma_f32(weight.y, relu(d[j * 4 + 1]), own[0]);
            own[1] = fma_f32(weight.x, relu_twice(d[j * 4 + 2]), own[1]);
            own[1] = fma_f32(weight.y, relu_twice(d[j * 4 + 3]), own[1]);
        }
        return sums;
    }
};

// What the scale of the key is multiplied with whose sums `sum_of_lane` gives a lane: those of a lane's second row are doubled.
QG_DEVICE float row_factor(u32 lane) {
    return lane & 1u ? 0.5f : 1.0f;
}

// The sums of a query over the columns of two lanes: lane t of four gets that of row t % 2. Lanes exchange what they do not keep.
QG_DEVICE float sum_of_row(const float (&own)[2], u32 lane) {
    const bool odd = lane & 1u;
    return (odd ? own[1] : own[0]) + shfl_xor(odd ? own[0] : own[1], 1);
}

// Those of two queries over all columns, from `sum_of_row` of each: lane t gets that of query t / 2.
QG_DEVICE float sum_of_lane(float of_first, float of_second, u32 lane) {
    const bool upper = lane & 2u;
    return (upper ? of_second : of_first) + shfl_xor(upper ? of_first : of_second, 2);
}
