// Online softmax on MMA accumulators: of every four registers,
// two belong to the lane's first row and two to its second.
#pragma once
#include "atoms/max.cuh"
#include "attention/problem.cuh"
#include "dequant/halves.cuh"

// Rounds two numbers to the operand type.
QG_DEVICE u32 rounded_pair(float low, float high) {
    return f32_to_halves<QG_KV>(low, high);
}

// Masks the scores of keys that a query does not attend to.
template <u32 SCORES>
QG_DEVICE void mask_scores(float (&scores)[SCORES], const KeyRange (&visible)[2], u32 tile) {
    const u32 lane = thread_index() % 32;
#pragma unroll
    for (u32 i = 0; i < SCORES; i++) {
        const u32 key = tile + i / 4 * 8 + lane % 4 * 2 + i % 2;
        const KeyRange& of_row = visible[i / 2 % 2];
        if (key < of_row.first || key >= of_row.end) scores[i] = minus_infinity();
    }
}

// Online softmax of a tile: scores become
// exp2(score · factor − row_max · factor). `factor`
// must be positive. Multiply the accumulators by
// `rescale`. `row_sum` is the lane's partial sum.
template <u32 SCORES>
QG_DEVICE void online_softmax(float (&scores)[SCORES], float (&rescale)[2], float (&row_max)[2], float (&row_sum)[2], float factor) {
    // Two independent chains a row.
    float next_max[2][2];
#pragma unroll
    for (u32 row = 0; row < 2; row++) next_max[row][0] = row_max[row], next_max[row][1] = scores[row * 2 + 1];
#pragma unroll
    for (u32 i = 0; i < SCORES; i++) next_max[i / 2 % 2][i % 2] = max_f32(scores[i], next_max[i / 2 % 2][i % 2]);
    float base[2];
#pragma unroll
    for (u32 row = 0; row < 2; row++) {
        float next = max_f32(next_max[row][0], next_max[row][1]);
        next = max_f32(shfl_xor(next, 1), next);
        next = max_f32(shfl_xor(next, 2), next);
        // Avoid (−inf) − (−inf) = NaN when a row is fully masked.
        base[row] = next == minus_infinity() ? 0.0f : next * factor;
        rescale[row] = ex2_approx(fma_f32(row_max[row], factor, -base[row]));
        row_max[row] = next;
        row_sum[row] *= rescale[row];
    }
#pragma unroll
    for (u32 i = 0; i < SCORES; i++) {
        scores[i] = ex2_approx(fma_f32(scores[i], factor, -base[i / 2 % 2]));
        row_sum[i / 2 % 2] += scores[i];
    }
}

// Whether any row_max of the warp
// changed; most tiles change none.
QG_DEVICE bool needs_rescale(const float (&rescale)[2]) {
    return ballot(rescale[0] != 1.0f || rescale[1] != 1.0f) != 0;
}

// row_max as a base-2 exponent.
QG_DEVICE float max_exponent(float row_max, float factor) {
    return row_max == minus_infinity() ? row_max : row_max * factor;
}
