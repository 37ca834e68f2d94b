// The product of a consumer warpgroup with 8-bit integers: 64 tokens of X, which pass through registers, and PARTS times PART_N
// features of W, which the instructions read from shared memory as they are packed: unsigned, 128 more than they stand for. The
// sums of X's codes take that away again. Sums of more than FLUSH_STAGES stages are added in f32.
#pragma once
#include "atoms/shared_in_register.cuh"
#include "atoms/wgmma_s8.cuh"
#include "mainloop/sm90/x_place.cuh"

static_assert(!HAS_BLOCK_SCALES, "sums are exact, and scaled once");

// What codes of W are stored plus.
constexpr i32 W_OFFSET = 128;

// Stages whose products of a byte below 256 and one of at most 128 in magnitude fill 31 bits, and whether registers have room for sums
// and numbers side by side. Where they have not, the host plans no more stages.
constexpr u32 FLUSH_STAGES = 65536 / STAGE_K;
constexpr bool FLUSHES = PARTS * PART_N / 2 <= 64;

// The D registers of the instructions, side by side. Of eight features each, a lane holds two of its first token and two
// of its second. Where sums are not flushed, they become numbers in the same registers.
struct Accumulators {
    float value[PARTS][PART_N / 2];
};
// Accumulators in their order, which they are in here.
QG_DEVICE const Accumulators& in_order(const Accumulators& acc, u32) {
    return acc;
}

struct Sums {
    i32 value[PARTS][PART_N / 2];
};

// Four products of signed bytes with 1.
QG_DEVICE i32 add_bytes(u32 bytes, i32 sum) {
    return dp4a((i32)bytes, 0x01010101, sum);
}

// sums += X · Wᵀ over a stage. Waits for the instructions.
QG_DEVICE void multiply_stage(Sums& sums, const XFragments& x, const Pipeline& pipeline, u32 stage, u32 first_row) {
    // From a k-block to the next, and from a step to the next within.
    constexpr u32 BLOCK = SHARE_K_BLOCK >> 4, STEP = INSTRUCTION_K >> 4;
#pragma unroll
    for (u32 part = 0; part < PARTS; part++) wgmma_fence_accumulators(sums.value[part]);
    wgmma_fence();
#pragma unroll
    for (u32 part = 0; part < PARTS; part++) {
        const u64 columns = wgmma_descriptor_64b(Pipeline::w_rows(pipeline, stage, first_row + part * PART_N));
        wgmma_k32_s8_u8<PART_N, 1>(sums.value[part], x.a[0], columns);
        wgmma_k32_s8_u8<PART_N, 1>(sums.value[part], x.a[1], columns + STEP);
        wgmma_k32_s8_u8<PART_N, 1>(sums.value[part], x.a[2], columns + BLOCK);
        wgmma_k32_s8_u8<PART_N, 1>(sums.value[part], x.a[3], columns + BLOCK + STEP);
    }
    wgmma_commit_group();
    wgmma_wait_group<0>();
#pragma unroll
    for (u32 part = 0; part < PARTS; part++) wgmma_fence_accumulators(sums.value[part]);
}

// acc += X · Wᵀ over `count` stages, at most FLUSH_STAGES, but for the factors of tokens.
template <bool ADDS>
QG_DEVICE void multiply_stages(Accumulators& acc, Pipeline& pipeline, Position& at, u32 tokens, u32 count,
                               const LanePlace& place, u32 lane) {
    Sums sums = {};
    // Of the codes of the lane's columns of its two tokens.
    i32 codes[2] = {0, 0};
    const XPlace x_place = XPlace::of(place, tokens, lane);
#pragma unroll 1
    for (; count > 0; count--) {
        Position::wait_full(at, pipeline);
        XColumns columns;
        XPlace::load(columns, pipeline.x[Position::stage(at)], x_place, 0);
        XPlace::load(columns, pipeline.x[Position::stage(at)], x_place, 1);
        XFragments x = XColumns::in_order(columns);
#pragma unroll
        for (u32 step = 0; step < STEPS; step++) {
#pragma unroll
            for (u32 i = 0; i < 4; i++) codes[i % 2] = add_bytes(x.a[step][i], codes[i % 2]);
            wgmma_fence_operand(x.a[step]);
        }
        multiply_stage(sums, x, pipeline, Position::stage(at), place.group_n * PARTS * PART_N);
        Pipeline::release(pipeline, Position::stage(at), lane);
        Position::next(at);
    }
#pragma unroll
    for (u32 token = 0; token < 2; token++) {
        // Four lanes have the columns of a token.
#pragma unroll
        for (u32 mask = 1; mask < 4; mask *= 2) codes[token] += (i32)shfl_xor_u32((u32)codes[token], mask);
        codes[token] *= W_OFFSET;
    }
#pragma unroll
    for (u32 part = 0; part < PARTS; part++)
#pragma unroll
        for (u32 i = 0; i < PART_N / 2; i++) {
            const float sum = (float)(sums.value[part][i] - codes[i / 2 % 2]);
            acc.value[part][i] = ADDS ? acc.value[part][i] + sum : sum;
        }
}

// acc = X · Wᵀ over `count` stages, of `tokens` tokens.
QG_DEVICE void multiply_tile(Accumulators& acc, Pipeline& shared, Position& at, u32 tokens, const WorkTile& work, const GemmParams&,
                             const LanePlace& place, u32 lane) {
    u32 count = work.end - work.begin;
    Pipeline& pipeline = shared_in_register(shared);
    if constexpr (FLUSHES) {
        acc = {};
#pragma unroll 1
        for (; count > 0;) {
            const u32 stages = count < FLUSH_STAGES ? count : FLUSH_STAGES;
            multiply_stages<true>(acc, pipeline, at, tokens, stages, place, lane);
            count -= stages;
        }
    } else {
        multiply_stages<false>(acc, pipeline, at, tokens, count, place, lane);
    }
}
