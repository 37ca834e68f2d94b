// Indexer scores with FP8 WGMMA: operand A is
// keys in registers, operand B the heads of
// queries in shared memory; weighted ReLU sums.
#pragma once
#include "atoms/relu.cuh"
#include "atoms/relu_twice.cuh"
#include "atoms/warp.cuh"
#include "atoms/wgmma_fp8.cuh"

constexpr u32 FEATURES = 128, STEPS = FEATURES / 32;
// Columns of a WGMMA, and the queries in them.
constexpr u32 COLUMNS = 64, COLUMN_QUERIES = COLUMNS / QG_HEADS;
static_assert(QG_HEADS == 32 || QG_HEADS == 64, "columns are whole queries");
// Accumulators of a lane for 64 columns: two rows.
constexpr u32 ACCUMULATORS = COLUMNS / 2;

// A fragments of a lane: rows g
// and g + 8 of its warp's 16 keys.
struct LaneKeys {
    u32 a[STEPS][4];
};

// D = keys · heads over all features, for 64 columns.
QG_DEVICE void multiply(float (&d)[ACCUMULATORS], const LaneKeys& keys, u64 columns) {
    // Descriptor step within rows of 128 bytes.
    constexpr u32 STEP = 32 >> 4;
    wgmma_k32_e4m3_e4m3<COLUMNS, 0>(d, keys.a[0], columns);
#pragma unroll
    for (u32 step = 1; step < STEPS; step++) wgmma_k32_e4m3_e4m3<COLUMNS, 1>(d, keys.a[step], columns + step * STEP);
    wgmma_commit_group();
}

// Weighted ReLU sums of a lane's two rows, per query.
// The second row is doubled; `row_factor` undoes this.
struct Sums {
    float value[COLUMN_QUERIES][2];

    QG_DEVICE Sums of(const float (&d)[ACCUMULATORS], const float* weights, u32 lane) {
        Sums sums = {};
#pragma unroll
        for (u32 j = 0; j < COLUMNS / 8; j++) {
            // 8-byte loads: four distinct addresses a warp are
            // one wavefront. 16-byte loads would need four.
            const f32x2 weight = ld_shared(reinterpret_cast<const f32x2*>(weights + j * 8 + lane % 4 * 2));
            float(&own)[2] = sums.value[j * 8 / QG_HEADS];
            // One ReLU by comparison, one by
            // addition: balances the two pipes.
            own[0] = fma_f32(weight.x, relu(d[j * 4]), own[0]);
            own[0] = fma_f32(weight.y, relu(d[j * 4 + 1]), own[0]);
            own[1] = fma_f32(weight.x, relu_twice(d[j * 4 + 2]), own[1]);
            own[1] = fma_f32(weight.y, relu_twice(d[j * 4 + 3]), own[1]);
        }
        return sums;
    }
};

// Scale factor of the key that `sum_of_lane`
// returns: second rows are doubled.
QG_DEVICE float row_factor(u32 lane) {
    return lane & 1u ? 0.5f : 1.0f;
}

// Sums over two lanes: lane t of four receives row t % 2.
QG_DEVICE float sum_of_row(const float (&own)[2], u32 lane) {
    const bool odd = lane & 1u;
    return (odd ? own[1] : own[0]) + shfl_xor(odd ? own[0] : own[1], 1);
}

// Sums of two queries over all columns:
// lane t receives query t / 2.
QG_DEVICE float sum_of_lane(float of_first, float of_second, u32 lane) {
    const bool upper = lane & 2u;
    return (upper ? of_second : of_first) + shfl_xor(upper ? of_first : of_second, 2);
}
