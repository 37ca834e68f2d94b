// INT8 consumer warpgroup: 64 tokens of X in registers, PARTS
// · PART_N features of W in shared memory.
// W is read as packed: unsigned codes with an offset of 128.
// Sums of X's codes remove the offset.
// Sums of more than FLUSH_STAGES stages are added in f32.
#pragma once
#include "atoms/shared_in_register.cuh"
#include "atoms/wgmma_s8.cuh"
#include "mainloop/sm90/x_address.cuh"

static_assert(!HAS_BLOCK_SCALES, "sums are exact, and scaled once");

// Offset of stored W codes.
constexpr i32 W_OFFSET = 128;

// Stages until an s32 sum may overflow: bytes below 256 times
// bytes of magnitude up to 128 fill 31 bits.
// FLUSHES: registers have room for both s32 and f32 sums.
// Otherwise the host plans at most FLUSH_STAGES stages.
constexpr u32 FLUSH_STAGES = 65536 / STAGE_K;
constexpr bool FLUSHES = PARTS * PART_N / 2 <= 64;

// D registers of the instructions.
// Per eight features a lane has two accumulators of its first
// token and two of its second.
// Without flushes the s32 sums are converted in place.
struct Accumulators {
    float value[PARTS][PART_N / 2];  // [part][register]
};
// The accumulators already have standard order.
QG_DEVICE const Accumulators& in_order(const Accumulators& acc, u32) {
    return acc;
}

struct Sums {
    i32 value[PARTS][PART_N / 2];
};

// Adds four signed bytes to `sum`.
QG_DEVICE i32 add_bytes(u32 bytes, i32 sum) {
    return dp4a((i32)bytes, 0x01010101, sum);
}

// sums += X · Wᵀ over a stage; waits for the wgmmas.
QG_DEVICE void multiply_stage(Sums& sums, const XFragments& x, const Pipeline& pipeline, u32 stage, u32 first_row) {
    // Descriptor strides: next k-block, next k-step.
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

// acc += X · Wᵀ over `count` ≤ FLUSH_STAGES stages,
// without token scales.
template <bool ADDS>
QG_DEVICE void multiply_stages(Accumulators& acc, Pipeline& pipeline, Position& at, u32 tokens, u32 count,
                               const LaneOffsets& place, u32 lane) {
    Sums sums = {};
    // Code sums of the lane's columns, for its two tokens.
    i32 codes[2] = {0, 0};
    const XAddress x_address = XAddress::of(place, tokens, lane);
#pragma unroll 1
    for (; count > 0; count--) {
        Position::wait_full(at, pipeline);
        XColumns columns;
        XAddress::load(columns, pipeline.x[Position::stage(at)], x_address, 0);
        XAddress::load(columns, pipeline.x[Position::stage(at)], x_address, 1);
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
        // Four lanes hold the columns of a token.
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

// acc = X · Wᵀ over the stages of a work tile.
QG_DEVICE void multiply_tile(Accumulators& acc, Pipeline& shared, Position& at, u32 tokens, const WorkTile& work, const GemmParams&,
                             const LaneOffsets& place, u32 lane) {
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
