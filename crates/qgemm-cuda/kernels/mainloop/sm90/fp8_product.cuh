// The product of a consumer warpgroup with 8-bit codes: 64 tokens of X, which pass through registers, and PARTS times PART_N
// features of W, which the instructions read from shared memory.
//
// The instructions start from zero every 128 columns, and their sums are added in f32, times both scales of these columns.
#pragma once
#include "atoms/wgmma_fp8.cuh"
#include "mainloop/sm90/consumer_place.cuh"

// Runs of rows in a part that share a record of scales.
constexpr u32 PART_RUNS = PART_N / SCALE_ROWS;

// The D registers of the instructions, side by side. Of eight features each, a lane holds two of its first token and two
// of its second.
struct Accumulators {
    float value[PARTS][PART_N / 2];
};

// Whether all rows of a part share a scale, or, of a gated pair, runs of rows two in turn.
constexpr bool PART_SHARES_SCALES = QG_W_SCALE_ROWS >= PART_N;

// The scales of a stage that a lane holds: of its two tokens, and, of each part, of the first two runs of rows, or of the run that is its
// number.
struct LaneScales {
    float x[2];
    float w[PARTS][2];

    QG_DEVICE LaneScales load(const StageScales& all, const LanePlace& place, u32 lane) {
        LaneScales s = {};
        StageScales::load_x(all, place.token, s.x);
        if constexpr (QG_W_BLOCK_SCALES) {
#pragma unroll
            for (u32 part = 0; part < PARTS; part++) {
                const float* runs = &all.w[(place.group_n * PARTS + part) * PART_RUNS];
                if constexpr (PART_SHARES_SCALES)
                    s.w[part][0] = ld_shared(&runs[0]), s.w[part][1] = ld_shared(&runs[1]);
                else
                    s.w[part][0] = ld_shared(&runs[lane % PART_RUNS]);
            }
        }
        return s;
    }
};

// acc += sums · scales, where runs of rows have these of W in turn.
QG_DEVICE void promote_pairs(float (&acc)[PART_N / 2], const float (&sums)[PART_N / 2], const float (&x)[2],
                             const float (&w)[2]) {
    const float factor[2][2] = {{x[0] * w[0], x[0] * w[1]}, {x[1] * w[0], x[1] * w[1]}};
#pragma unroll
    for (u32 i = 0; i < PART_N / 2; i++) acc[i] = fma_f32(factor[i / 2 % 2][i / 4 % 2], sums[i], acc[i]);
}

// acc += sums · scales, for a part.
QG_DEVICE void promote(float (&acc)[PART_N / 2], const float (&sums)[PART_N / 2], const LaneScales& scales, u32 part,
                       u32 lane) {
    if constexpr (!QG_W_BLOCK_SCALES) {
#pragma unroll
        for (u32 i = 0; i < PART_N / 2; i++)
            acc[i] = QG_X_BLOCK_SCALES ? fma_f32(scales.x[i / 2 % 2], sums[i], acc[i]) : acc[i] + sums[i];
        return;
    }
    if constexpr (PART_SHARES_SCALES) {
        promote_pairs(acc, sums, scales.x, scales.w[part]);
        return;
    }
    const u32 own = f32_to_bits(scales.w[part][0]);
    const u32 first = shfl_idx_u32(own, 0), second = shfl_idx_u32(own, 1);
    if (ballot(own != (lane % 2 == 0 ? first : second)) == 0) {
        promote_pairs(acc, sums, scales.x, {bits_to_f32(first), bits_to_f32(second)});
    } else {
#pragma unroll
        for (u32 run = 0; run < PART_RUNS; run++) {
            const float w = bits_to_f32(shfl_idx_u32(own, run));
#pragma unroll
            for (u32 i = 0; i < 4; i++) acc[run * 4 + i] = fma_f32(scales.x[i / 2] * w, sums[run * 4 + i], acc[run * 4 + i]);
        }
    }
}

template <u32 ADDS>
QG_DEVICE void multiply_step(float (&sums)[PART_N / 2], const u32 (&a)[4], u64 w) {
#if QG_W_E5M2
    wgmma_k32_e4m3_e5m2<PART_N, ADDS>(sums, a, w);
#else
    wgmma_k32_e4m3_e4m3<PART_N, ADDS>(sums, a, w);
#endif
}

// sums = X · Wᵀ over a stage, for the features from `w` on. Waits for the instructions.
QG_DEVICE void multiply_stage(float (&sums)[PART_N / 2], const XFragments& x, const u8* w) {
    const u64 columns = wgmma_descriptor_64b(w);
    // From a k-block to the next, and from a step to the next within.
    constexpr u32 BLOCK = SHARE_K_BLOCK >> 4, STEP = INSTRUCTION_K >> 4;
    wgmma_fence_accumulators(sums);
    wgmma_fence();
    multiply_step<0>(sums, x.a[0], columns);
    multiply_step<1>(sums, x.a[1], columns + STEP);
    multiply_step<1>(sums, x.a[2], columns + BLOCK);
    multiply_step<1>(sums, x.a[3], columns + BLOCK + STEP);
    wgmma_commit_group();
    wgmma_wait_group<0>();
    wgmma_fence_accumulators(sums);
}
// acc = X · Wᵀ over `count` stages, of tokens from `first_token` on, which may be behind the last.
QG_DEVICE void multiply_tile(Accumulators& acc, Pipeline& pipeline, Position& at, const Fp8GemmParams& params,
                             u32 first_token, u32 count, const LanePlace& place, u32 lane) {
    acc = {};
    const u32 m = params.gemm.shape.m, tokens = first_token < m ? m - first_token : 0;
#pragma unroll 1
    for (; count > 0; count--) {
        mbarrier_wait(&pipeline.full[at.stage], at.parity);
        XFragments x;
        XFragments::load(x, pipeline.x[at.stage], place.token, tokens, lane);
#pragma unroll
        for (u32 step = 0; step < STEPS; step++) wgmma_fence_operand(x.a[step]);
        const LaneScales scales = LaneScales::load(pipeline.scales[at.stage], place, lane);
#pragma unroll
        for (u32 part = 0; part < PARTS; part++) {
            float sums[PART_N / 2];
            multiply_stage(sums, x, Pipeline::w_rows(pipeline, at.stage, (place.group_n * PARTS + part) * PART_N));
            if (part == PARTS - 1) Pipeline::release(pipeline, at.stage, lane);
            promote(acc.value[part], sums, scales, part, lane);
        }
        Position::next(at);
    }
    if constexpr (!QG_X_BLOCK_SCALES) {
        float factor[2];
        load_token_factors(factor, params, first_token + place.token);
#pragma unroll
        for (u32 part = 0; part < PARTS; part++)
#pragma unroll
            for (u32 i = 0; i < PART_N / 2; i++) acc.value[part][i] *= factor[i / 2 % 2];
    }
}
