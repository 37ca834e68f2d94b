// Products of E4M3 keys, rows of `wgmma` in registers, with the heads of queries, columns in shared memory, and what they become.
#pragma once
#include "atoms/relu.cuh"
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

// Where a column's weight stands among those of its columns: what a lane needs of sixteen columns is sixteen bytes.
QG_DEVICE u32 weight_place(u32 column) {
    return column / 16 * 16 + column % 8 / 2 * 4 + column / 8 % 2 * 2 + column % 2;
}

// What a lane's two rows have of each query of 64 columns.
struct Sums {
    float value[COLUMN_QUERIES][2];

    QG_DEVICE Sums of(const float (&d)[ACCUMULATORS], const float* weights, u32 lane) {
        Sums sums = {};
#pragma unroll
        for (u32 j = 0; j < COLUMNS / 16; j++) {
            const f32x4 weight = ld_shared(reinterpret_cast<const f32x4*>(weights + j * 16 + lane % 4 * 4));
            float(&own)[2] = sums.value[j * 16 / QG_HEADS];
#pragma unroll
            for (u32 row = 0; row < 2; row++) {
                const float* column = d + j * 8 + row * 2;
                own[row] = fma_f32(weight.x, relu(column[0]), own[row]);
                own[row] = fma_f32(weight.y, relu(column[1]), own[row]);
                own[row] = fma_f32(weight.z, relu(column[4]), own[row]);
                own[row] = fma_f32(weight.w, relu(column[5]), own[row]);
            }
        }
        return sums;
    }
};

// The sums of two queries over all columns: lane t of four gets that of query t / 2 and row t % 2. Lanes exchange what they do not keep.
QG_DEVICE float sum_of_lane(const float (&first)[2], const float (&second)[2], u32 lane) {
    const bool odd = lane & 1u, upper = lane & 2u;
    const float of_first = (odd ? first[1] : first[0]) + shfl_xor(odd ? first[0] : first[1], 1);
    const float of_second = (odd ? second[1] : second[0]) + shfl_xor(odd ? second[0] : second[1], 1);
    return (upper ? of_second : of_first) + shfl_xor(upper ? of_first : of_second, 2);
}
