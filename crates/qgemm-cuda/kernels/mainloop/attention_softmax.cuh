// Online softmax on accumulators of matrix instructions: of each four, two are of a lane's first row and two of its second.
#pragma once
#include "atoms/max.cuh"
#include "mainloop/attention_keys.cuh"

// Two numbers, rounded to the operands' type.
QG_DEVICE u32 rounded_pair(float low, float high) {
    return QG_KV == DTYPE_BF16 ? f32_to_bf16x2(low, high) : f32_to_f16x2(low, high);
}

// Takes away the scores of keys from `tile` on that a query does not see.
template <u32 SCORES>
QG_DEVICE void mask_scores(float (&scores)[SCORES], const KeyRange (&seen)[2], u32 tile) {
    const u32 lane = thread_index() % 32;
#pragma unroll
    for (u32 i = 0; i < SCORES; i++) {
        const u32 key = tile + i / 4 * 8 + lane % 4 * 2 + i % 2;
        const KeyRange& of_row = seen[i / 2 % 2];
        if (key < of_row.first || key >= of_row.end) scores[i] = minus_infinity();
    }
}

// Scores become weights: powers of 2 of their products with `factor`, which is positive, less those of the largest so far. What sums
// so far are multiplied with is `kept`; `total` is the lane's share of the sum of weights.
template <u32 SCORES>
QG_DEVICE void weigh(float (&scores)[SCORES], float (&kept)[2], float (&largest)[2], float (&total)[2], float factor) {
    // Two chains a row.
    float above[2][2];
#pragma unroll
    for (u32 row = 0; row < 2; row++) above[row][0] = largest[row], above[row][1] = scores[row * 2 + 1];
#pragma unroll
    for (u32 i = 0; i < SCORES; i++) above[i / 2 % 2][i % 2] = max_f32(scores[i], above[i / 2 % 2][i % 2]);
    float base[2];
#pragma unroll
    for (u32 row = 0; row < 2; row++) {
        float next = max_f32(above[row][0], above[row][1]);
        next = max_f32(shfl_xor(next, 1), next);
        next = max_f32(shfl_xor(next, 2), next);
        // Of minus infinities no power is taken of a difference of two.
        base[row] = next == minus_infinity() ? 0.0f : next * factor;
        kept[row] = ex2_approx(fma_f32(largest[row], factor, -base[row]));
        largest[row] = next;
        total[row] *= kept[row];
    }
#pragma unroll
    for (u32 i = 0; i < SCORES; i++) {
        scores[i] = ex2_approx(fma_f32(scores[i], factor, -base[i / 2 % 2]));
        total[i / 2 % 2] += scores[i];
    }
}

// Whether sums change that are multiplied with `kept`: the largest seldom does.
QG_DEVICE bool is_less_kept(const float (&kept)[2]) {
    return ballot(kept[0] != 1.0f || kept[1] != 1.0f) != 0;
}

// The exponent to base 2 of the largest score.
QG_DEVICE float largest_exponent(float largest, float factor) {
    return largest == minus_infinity() ? largest : largest * factor;
}
