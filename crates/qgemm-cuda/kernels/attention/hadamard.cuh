// Hadamard rotation of a head that lanes share,
// eight features a lane: butterflies of strides
// 1, 2, 4, …, then one multiplication.
// Every device adds in this order.
#pragma once
#include "atoms/float.cuh"
#include "atoms/rounded.cuh"
#include "atoms/warp.cuh"
#include "attention/problem.cuh"

// `lanes`: lanes of a block; 0 leaves `x` unchanged.
// `most_lanes`: the most in the warp. Warp-collective.
QG_DEVICE void hadamard(float (&x)[8], u32 lanes, u32 most_lanes, float scale) {
    float sums[8];
#pragma unroll
    for (u32 i = 0; i < 8; i++) sums[i] = x[i];
#pragma unroll
    for (u32 stride = 1; stride < 8; stride *= 2) {
#pragma unroll
        for (u32 i = 0; i < 8; i++) {
            const float first = sums[i & ~stride], second = sums[i | stride];
            if (!(i & stride)) sums[i] = first + second, sums[i | stride] = first - second;
        }
    }
#pragma unroll 1
    for (u32 mask = 1; mask < most_lanes; mask *= 2) {
        const float sign = thread_index() & mask ? -1.0f : 1.0f;
#pragma unroll
        for (u32 i = 0; i < 8; i++) {
            const float other = shfl_xor(sums[i], mask);
            if (mask < lanes) sums[i] = fma_f32(sums[i], sign, other);
        }
    }
#pragma unroll
    for (u32 i = 0; i < 8; i++)
        if (lanes != 0) x[i] = mul_rn_f32(sums[i], scale);
}
