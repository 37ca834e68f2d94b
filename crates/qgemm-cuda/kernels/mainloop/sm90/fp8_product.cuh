// FP8 consumer warpgroup: 64 tokens of X in registers, PARTS ·
// PART_N features of W in shared memory.
//
// Sums restart every 128 columns. They are added in f32, times
// both scales of these columns.
#pragma once
#include "atoms/shared_in_register.cuh"
#include "atoms/wgmma_fp8.cuh"
#include "mainloop/sm90/x_address.cuh"

// Scale records (runs of eight rows) per part.
constexpr u32 PART_RUNS = PART_N / SCALE_ROWS;

// D registers of the instructions.
// Per eight features a lane has two accumulators of its first
// token and two of its second.
struct Accumulators {
    float value[PARTS][PART_N / 2];  // [part][register]
};

// Accumulators in standard order.
// During accumulation pairs are swapped, so that a sum and its
// accumulator use different register banks.
QG_DEVICE Accumulators in_order(const Accumulators& acc, u32) {
    Accumulators all;
#pragma unroll
    for (u32 part = 0; part < PARTS; part++)
#pragma unroll
        for (u32 i = 0; i < PART_N / 2; i++) all.value[part][i] = acc.value[part][i ^ 1];
    return all;
}

// Whether all rows of a part share a scale, or, in a gated
// pair, alternating runs share two scales.
constexpr bool PART_SHARES_SCALES = QG_W_SCALE_ROWS >= PART_N;

// Factors of a part's sums, loaded during the wgmmas.
struct Factors {
    // [token][run % 2]: token scale times run scale.
    float pairs[2][2];
    // Whether all runs of equal parity have equal scales.
    // Otherwise `own` is the scale of run `lane`, and `x` has
    // the token scales.
    bool in_pairs;
    u32 own;
    float x[2];

    QG_DEVICE Factors load(const StageScales& all, const LaneOffsets& place, u32 part, u32 lane) {
        Factors f = {};
        StageScales::load_x(all, place.token, f.x);
        f.in_pairs = true;
        float w[2] = {1.0f, 1.0f};
        if constexpr (QG_W_BLOCK_SCALES) {
            const float* runs = &all.w[(place.group_n * PARTS + part) * PART_RUNS];
            if constexpr (PART_SHARES_SCALES) {
                w[0] = ld_shared(&runs[0]), w[1] = ld_shared(&runs[1]);
            } else {
                f.own = f32_to_bits(ld_shared(&runs[lane % PART_RUNS]));
                const u32 first = shfl_idx_u32(f.own, 0), second = shfl_idx_u32(f.own, 1);
                f.in_pairs = ballot(f.own != (lane % 2 == 0 ? first : second)) == 0;
                w[0] = bits_to_f32(first), w[1] = bits_to_f32(second);
            }
        }
#pragma unroll
        for (u32 token = 0; token < 2; token++) {
            f.pairs[token][0] = QG_W_BLOCK_SCALES ? f.x[token] * w[0] : f.x[token];
            f.pairs[token][1] = QG_W_BLOCK_SCALES ? f.x[token] * w[1] : f.x[token];
            wgmma_fence_accumulators(f.pairs[token]);
        }
        return f;
    }
};

// acc += sums · scales, for a part.
QG_DEVICE void promote(float (&acc)[PART_N / 2], const float (&sums)[PART_N / 2], const Factors& factors) {
    if constexpr (!HAS_BLOCK_SCALES) {
#pragma unroll
        for (u32 i = 0; i < PART_N / 2; i++) acc[i ^ 1] += sums[i];
        return;
    }
    if (factors.in_pairs) {
        // Grouped by factor, to hit the operand reuse cache.
#pragma unroll
        for (u32 pair = 0; pair < 4; pair++)
#pragma unroll
            for (u32 i = pair * 2; i < PART_N / 2; i += 8)
#pragma unroll
                for (u32 j = i; j < i + 2; j++) acc[j ^ 1] = fma_f32(factors.pairs[pair % 2][pair / 2], sums[j], acc[j ^ 1]);
    } else {
#pragma unroll
        for (u32 run = 0; run < PART_RUNS; run++) {
            const float w = bits_to_f32(shfl_idx_u32(factors.own, run));
#pragma unroll
            for (u32 i = 0; i < 4; i++)
                acc[run * 4 + (i ^ 1)] = fma_f32(factors.x[i / 2] * w, sums[run * 4 + i], acc[run * 4 + (i ^ 1)]);
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

// Descriptor advanced by `units` of 16 bytes.
// The lower word does not overflow.
QG_DEVICE u64 further(u64 descriptor, u32 units) {
    return (descriptor & 0xffffffff00000000) | ((u32)descriptor + units);
}

// Starts sums = X · Wᵀ over a stage for descriptor `w`.
// HALVES commits one group per k-block.
template <bool HALVES>
QG_DEVICE void start_stage(float (&sums)[PART_N / 2], const XFragments& x, u64 w) {
    // Descriptor strides: next k-block, next k-step.
    constexpr u32 BLOCK = SHARE_K_BLOCK >> 4, STEP = INSTRUCTION_K >> 4;
    wgmma_fence_accumulators(sums);
    wgmma_fence();
    multiply_step<0>(sums, x.a[0], w);
    multiply_step<1>(sums, x.a[1], further(w, STEP));
    if constexpr (HALVES) wgmma_commit_group();
    multiply_step<1>(sums, x.a[2], further(w, BLOCK));
    multiply_step<1>(sums, x.a[3], further(w, BLOCK + STEP));
    wgmma_commit_group();
}
// Waits for the first k-block's wgmmas, which own its operand
// registers until then.
QG_DEVICE void finish_half(XFragments& x) {
    wgmma_wait_group<1>();
#pragma unroll
    for (u32 step = 0; step < STEPS / 2; step++) wgmma_fence_operand(x.a[step]);
}
// Waits for all wgmmas.
QG_DEVICE void finish_stage(float (&sums)[PART_N / 2], XFragments& x) {
    wgmma_wait_group<0>();
    wgmma_fence_accumulators(sums);
#pragma unroll
    for (u32 step = 0; step < STEPS; step++) wgmma_fence_operand(x.a[step]);
}

// Descriptor stride of parts: within a share of W, or
// from share to share.
constexpr u32 PART_STRIDE = (PART_N < SHARE_N ? PART_N * PACKED_K_BLOCK : STAGE_K_BLOCKS * SHARE_K_BLOCK) >> 4;
static_assert(PARTS == 1 || (GROUPS_N == 1 && PARTS * PART_N == (PART_N < SHARE_N ? 1 : PARTS) * SHARE_N), "parts are alike");

// Load-ahead: the wait for the next stage overlaps the last
// wgmmas of this stage. A lane's columns are loaded as soon as
// registers are free, the rest before the sums are added.
// Memory-bound tiles instead release a stage before they
// wait for the next.
constexpr bool LOADS_AHEAD = IS_LARGEST;

// acc = X · Wᵀ over the stages of a work tile.
// `tokens` may be 0, or more than the tile has.
// All work that can wait runs during the wgmmas:
// nothing else fills this time.
QG_DEVICE void multiply_tile(Accumulators& acc, Pipeline& shared, Position& at, u32 tokens, const WorkTile& work, const GemmParams&,
                             const LaneOffsets& place, u32 lane) {
    u32 count = work.end - work.begin;
    acc = {};
    Pipeline& pipeline = shared_in_register(shared);
    const XAddress x_address = XAddress::of(place, tokens, lane);
    XColumns columns;
    const auto load = [&](u32 stage, u32 k_block) { XAddress::load(columns, pipeline.x[stage], x_address, k_block); };
    load(Position::stage(at), 0), load(Position::stage(at), 1);
#pragma unroll 1
    for (; count > 0; count--) {
        const u32 stage = Position::stage(at);
        XFragments x = XColumns::in_order(columns);
        const u64 w = wgmma_descriptor_64b(Pipeline::w_rows(pipeline, stage, place.group_n * PARTS * PART_N));
        Position::next(at);
        // After the last stage this reloads a valid stage, unused.
        const u32 next = count > 1 ? Position::stage(at) : stage;
#pragma unroll
        for (u32 part = 0; part < PARTS; part++) {
            float sums[PART_N / 2];
            const bool is_last = part == PARTS - 1, loads = LOADS_AHEAD && is_last;
            if (loads)
                start_stage<true>(sums, x, further(w, part * PART_STRIDE));
            else
                start_stage<false>(sums, x, further(w, part * PART_STRIDE));
            const Factors factors = Factors::load(pipeline.scales[stage], place, part, lane);
            if (loads && count > 1) Position::wait_full(at, pipeline);
            if (loads) finish_half(x), load(next, 0);
            finish_stage(sums, x);
            if (loads) load(next, 1);
            if (is_last) Pipeline::release(pipeline, stage, lane);
            promote(acc.value[part], sums, factors);
        }
        if (!LOADS_AHEAD && count > 1) {
            Position::wait_full(at, pipeline);
            load(Position::stage(at), 0), load(Position::stage(at), 1);
        }
    }
}
