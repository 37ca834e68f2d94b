// FP8 consumer warpgroup for W k-tiles in whole lines
// (mainloop/sm90/w_lines.cuh).
// It multiplies 64 tokens of X in registers by PART_N features
// of W in shared memory.
//
// A line holds 64 columns of a row, then 64 of the next row.
// So an instruction reads every second row:
// one pass for even rows, one for odd rows, each with
// its accumulators.
// Sums restart every 128 columns. They are added in f32, times
// both scales of these columns.
#pragma once
#include "atoms/shared_in_register.cuh"
#include "atoms/wgmma_fp8_lines.cuh"
#include "mainloop/sm90/x_address.cuh"

static_assert(PARTS == 1 && QG_W_BLOCK_SCALES, "a warpgroup's features have their sums at once, and a scale each eight");

// Row tiles of a warpgroup, and a lane's accumulators for even
// (or odd) features.
constexpr u32 GROUP_TILES = PART_N / 16, HALF_SUMS = PART_N / 4;

// Even features, then odd features.
// Per row tile: two accumulators of the lane's first token,
// two of its second.
// Lane t has features 4t..4t+3 of the row tile.
struct Accumulators {
    float value[2][HALF_SUMS];  // [even or odd feature][register]
};

// Accumulators in standard order: per eight features, 2t and
// 2t+1 of the first token, then of the second.
// Padded to whole rounds of `store_token_rows`.
struct OrderedAccumulators {
    float value[(PART_N + 31) / 32 * 16];
};

// Standard order needs other lanes' accumulators.
// During accumulation pairs are swapped, so that a sum and its
// accumulator use different register banks.
QG_DEVICE OrderedAccumulators in_order(const Accumulators& acc, u32 lane) {
    OrderedAccumulators all = {};
    const bool takes_last = lane % 2 == 1;
#pragma unroll
    for (u32 tile = 0; tile < GROUP_TILES; tile++)
#pragma unroll
        for (u32 token = 0; token < 2; token++)
#pragma unroll
            for (u32 eight = 0; eight < 2; eight++)
#pragma unroll
                for (u32 odd = 0; odd < 2; odd++) {
                    const u32 owner = lane / 4 * 4 + eight * 2 + lane % 4 / 2, i = tile * 4 + token * 2;
                    const u32 first = shfl_idx_u32(f32_to_bits(acc.value[odd][i + 1]), owner);
                    const u32 last = shfl_idx_u32(f32_to_bits(acc.value[odd][i]), owner);
                    all.value[(tile * 2 + eight) * 4 + token * 2 + odd] = bits_to_f32(takes_last ? last : first);
                }
    return all;
}

template <u32 ADDS>
QG_DEVICE void multiply_step(float (&sums)[HALF_SUMS], const u32 (&a)[4], u64 w) {
#if QG_W_E5M2
    wgmma_few_k32_e4m3_e5m2<PART_N / 2, ADDS>(sums, a, w);
#else
    wgmma_few_k32_e4m3_e4m3<PART_N / 2, ADDS>(sums, a, w);
#endif
}

// Starts sums = X · Wᵀ over a stage.
// The features' lines start at `w`; their codes start
// `unit` units later.
QG_DEVICE void start_stage(Accumulators& sums, const XFragments& x, const u8* w, u32 unit) {
    // Descriptor strides: next k-block, next k-step, next row.
    constexpr u32 BLOCK = 16 * PACKED_K_BLOCK / W_UNIT, STEP = INSTRUCTION_K / W_UNIT, NEXT_ROW = PACKED_K_BLOCK / W_UNIT;
    const u64 lines = wgmma_descriptor_lines<LINES_BYTES>(w);
    wgmma_fence_accumulators(sums.value[0]), wgmma_fence_accumulators(sums.value[1]);
    wgmma_fence();
#pragma unroll
    for (u32 step = 0; step < STEPS; step++)
#pragma unroll
        for (u32 odd = 0; odd < 2; odd++) {
            // Units are added to the descriptor's lower word
            // without overflow.
            const u64 codes = (lines & 0xffffffff00000000) | ((u32)lines + unit + odd * NEXT_ROW + step / 2 * BLOCK + step % 2 * STEP);
            if (step == 0)
                multiply_step<0>(sums.value[odd], x.a[step], codes);
            else
                multiply_step<1>(sums.value[odd], x.a[step], codes);
        }
    wgmma_commit_group();
}
QG_DEVICE void finish_stage(Accumulators& sums, XFragments& x) {
    wgmma_wait_group<0>();
    wgmma_fence_accumulators(sums.value[0]), wgmma_fence_accumulators(sums.value[1]);
#pragma unroll
    for (u32 step = 0; step < STEPS; step++) wgmma_fence_operand(x.a[step]);
}

// acc = X · Wᵀ over the stages of a work tile.
// `tokens` may be 0, or more than the tile has.
// The wait for the next stage overlaps the wgmmas of this stage.
// X of the next stage is loaded before the sums are added.
QG_DEVICE void multiply_tile(Accumulators& acc, Pipeline& shared, Position& at, u32 tokens, const WorkTile& work, const GemmParams& p,
                             const LaneOffsets& place, u32 lane) {
    acc = {};
    Pipeline& pipeline = shared_in_register(shared);
    const XAddress x_address = XAddress::of(place, tokens, lane);
    XColumns columns;
    const auto load = [&](u32 stage) {
#pragma unroll
        for (u32 k_block = 0; k_block < STAGE_K_BLOCKS; k_block++) XAddress::load(columns, pipeline.x[stage], x_address, k_block);
    };
    const u32 first_tile = place.group_n * GROUP_TILES;
    load(Position::stage(at));
#pragma unroll 1
    for (u32 k = work.begin; k < work.end; k++) {
        const u32 stage = Position::stage(at);
        XFragments x = XColumns::in_order(columns);
        const u32 unit = KTileLines::of(k, p.shape.k_tiles).unit;
        Position::next(at);
        Accumulators sums;
        start_stage(sums, x, pipeline.w[stage] + first_tile * LINES_BYTES, unit);
        float of_tokens[2], of_tiles[GROUP_TILES];
        StageScales::load_x(pipeline.scales[stage], place.token, of_tokens);
#pragma unroll
        for (u32 tile = 0; tile < GROUP_TILES; tile++) of_tiles[tile] = w_scale(pipeline.w[stage], first_tile + tile, unit, lane % 4 / 2);
        wgmma_fence_accumulators(of_tiles);
        const bool has_next = k + 1 < work.end;
        if (has_next) Position::wait_full(at, pipeline);
        finish_stage(sums, x);
        // After the last stage this reloads a valid stage, unused.
        load(has_next ? Position::stage(at) : stage);
        Pipeline::release(pipeline, stage, lane);
#pragma unroll
        for (u32 tile = 0; tile < GROUP_TILES; tile++)
#pragma unroll
            for (u32 token = 0; token < 2; token++) {
                const float factor = of_tokens[token] * of_tiles[tile];
#pragma unroll
                for (u32 odd = 0; odd < 2; odd++)
#pragma unroll
                    for (u32 i = tile * 4 + token * 2; i < tile * 4 + token * 2 + 2; i++)
                        acc.value[odd][i ^ 1] = fma_f32(factor, sums.value[odd][i], acc.value[odd][i ^ 1]);
            }
    }
}
