// Block-scaled product of a consumer warp:
// WARP_M tokens (MMA rows) by WARP_N features.
//
// X is in column order, as `ldmatrix` loads it.
// Lanes permute W to this order in registers, once for all
// tokens of the warp.
#pragma once
#include "atoms/ldmatrix.cuh"
#include "atoms/mma_block_scaled.cuh"
#include "atoms/opaque_register.cuh"
#include "mainloop/sm120/block_scaled_pipeline.cuh"

// Tokens and features per warp and per instruction.
constexpr u32 WARP_M = QG_TILE_M / QG_WARPS_M, WARP_N = QG_TILE_N / QG_WARPS_N;
constexpr u32 MMA_M = 16, MMA_N = 8, M_TILES = WARP_M / MMA_M, N_TILES = WARP_N / MMA_N;
constexpr u32 ROW_TILES = WARP_N / QG_TILE_ROWS;
static_assert(QG_WARPS_M * QG_WARPS_N * 32 == QG_CONSUMERS, "warps share the tile");
static_assert(M_TILES % 2 == 0, "the lanes of a quad hold scales of two instructions");

#if QG_X_BITS == 8
#include "mainloop/sm120/mxf8_operands.cuh"
#else
#include "mainloop/sm120/fp4_operands.cuh"
#endif

// D registers of the instructions.
struct Accumulators {
    float value[M_TILES][N_TILES][4];  // [M tile][N tile][register]
};

// Row g of an instruction is token `token_of(g)` of eight.
// Lanes that write accumulators in the epilogue then
// reach all banks.
QG_DEVICE u32 token_of(u32 row) {
    return row % 2 * 4 + row / 2;
}

// Precomputed addresses of the lane's data in a stage.
// The compiler would recompute them for every stage.
struct LaneOffsets {
    // Offsets of the `ldmatrix` rows of X, the tokens' scales and
    // the warp's row tiles, and the permutation of W.
    u32 x, scale, w;
    WOrder order;

    // Matrices of an `ldmatrix`: tokens 0..7 and 8..15 of a
    // 16-byte chunk, then of the next chunk.
    // Chunk c of token r is at c ^ (r / 2 % 4), TMA's
    // 64-byte swizzle.
    QG_DEVICE LaneOffsets of(u32 warp, u32 lane) {
        const u32 first = warp % QG_WARPS_M * WARP_M, row = lane / 8 % 2 * 8 + token_of(lane % 8), t = lane % 4;
        const u32 x = (first + row) * X_STAGE_BYTES + (lane / 16 ^ row / 2 % 4) * 16;
        const u32 token = first + t / 2 * 16 + t % 2 * 8 + token_of(lane / 4);
        return {opaque_register(x), opaque_register(token), opaque_register(warp / QG_WARPS_M * (ROW_TILES * W_STAGE_BYTES)),
                WOrder::of_lane(lane)};
    }
};

// Scales of X for a step.
// Thread i of an instruction pair scales every second 16 tokens.
struct XScales {
    u32 word[M_TILES / 2];

    // `half` is the half of the word, if two stages share words.
    QG_DEVICE void load(XScales& s, const u32 (&words)[QG_TILE_M], u32 token, u32 half) {
#pragma unroll
        for (u32 i = 0; i < M_TILES / 2; i++) {
            const u32* own = &words[token + i * 32];
            s.word[i] = WORD_STAGES == 1 ? ld_shared(own) : ld_shared(reinterpret_cast<const u16*>(own) + half);
        }
    }
};
static_assert(WORD_STAGES <= 2, "two stages share a word at most");

// acc += X · Wᵀ over a stage.
QG_DEVICE void multiply_stage(Accumulators& acc, const Pipeline& pipeline, u32 stage, u32 half, const LaneOffsets& place) {
    const u32 x = shared_address(pipeline.x[stage]);
    WStage w;
    WStage::load(w, pipeline.w[stage][0] + place.w, place.order);
    XScales x_scales;
#pragma unroll
    for (u32 step = 0; step < STEPS; step++) {
        if (step % (STEPS / SCALE_WORDS) == 0)
            XScales::load(x_scales, pipeline.x_scale[stage][step * SCALE_WORDS / STEPS], place.scale, half);
        WOperand operand;
        WStage::operand(w, operand, step, place.order);
        // The barrier stops the compiler from loading X of both steps
        // at once, which would spill.
        if (step > 0) warp_barrier();
#pragma unroll
        for (u32 mt = 0; mt < M_TILES; mt++) {
            u32 a[4];
            ldmatrix_x4(a, x + (place.x ^ step * STEP_BYTES) + mt * (MMA_M * X_STAGE_BYTES));
#pragma unroll
            for (u32 nt = 0; nt < N_TILES; nt++)
                mma_step(acc.value[mt][nt], a, operand.code[nt], x_scales.word[mt / 2], mt % 2, operand.scale[nt / 2], nt % 2, step);
        }
    }
}

// Multiplies each token's sums by its factor, if X has factors.
QG_DEVICE void scale_tokens(Accumulators& acc, const BlockScaledParams& params, u32 first_token) {
    if (params.x_factors == 0) return;
    const u32 last = params.gemm.shape.m - 1;
#pragma unroll
    for (u32 mt = 0; mt < M_TILES; mt++)
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            const u32 own = first_token + mt * MMA_M + half * 8, token = own < last ? own : last;
            const float factor =
                bits_to_f32(ld_global_u32(reinterpret_cast<const u8*>(params.x_factors) + token * params.x_factor_row));
#pragma unroll
            for (u32 nt = 0; nt < N_TILES; nt++)
#pragma unroll
                for (u32 i = 0; i < 2; i++) acc.value[mt][nt][half * 2 + i] *= factor;
        }
}
