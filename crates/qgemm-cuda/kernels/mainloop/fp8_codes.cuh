// FP8 main loops with FP8 operands: shared parts.
// Tokens are the rows of MMA instructions, features the columns.
// Neither operand is decoded.
//
// A packed k-block of 16 rows has 64 bytes a row. Its
// 16-byte chunk t holds columns 16s + {2t, 2t+8, 2t+1,
// 2t+9}, s = 0..3.
// A dot product allows any order of columns that both
// operands share. So W keeps this order, and lanes
// permute X in registers.
#pragma once
#include "atoms/cp_async.cuh"
#include "atoms/memory.cuh"
#include "atoms/numeric.cuh"
#include "sched/params.cuh"

struct Fp8GemmParams {
    GemmParams gemm;
    // f32 scales of X: per token and 128 columns, or per token if
    // QG_X_BLOCK_SCALES is 0.
    // Token m starts at `x_scales` + m · `x_scale_row` bytes.
    u64 x_scales, x_scale_row;
};

// Columns of a stage, which share a scale, and of a packed
// k-block. The schedule's k-tiles are stages.
constexpr u32 STAGE_K = 128, PACKED_K_BLOCK = 64;
constexpr u32 STAGE_K_BLOCKS = STAGE_K / PACKED_K_BLOCK;
// K-blocks of a packed k-tile, which is a stage or part of one.
constexpr u32 K_TILE_K_BLOCKS = QG_K_TILE / PACKED_K_BLOCK;
static_assert(STAGE_K_BLOCKS % K_TILE_K_BLOCKS == 0, "a stage is whole k-tiles");
// Rows of W per scale record.
constexpr u32 SCALE_ROWS = 8, CTA_SCALES = QG_TILE_N / SCALE_ROWS;
constexpr bool HAS_BLOCK_SCALES = QG_X_BLOCK_SCALES || QG_W_BLOCK_SCALES;
// K per instruction, and instructions per stage.
constexpr u32 INSTRUCTION_K = 32, STEPS = STAGE_K / INSTRUCTION_K;

// Row g of an instruction is token `token_of(g)` of eight.
// Eight lanes that load 16 bytes each then reach all banks.
QG_DEVICE u32 token_of(u32 row) {
    return row % 2 * 4 + row / 2;
}

// A operands of a stage for 16 tokens.
struct XFragments {
    u32 a[STEPS][4];

    // `x` is the stage: 128 bytes per token, with chunk c of token
    // r at c ^ (r % 8).
    // Lanes hold columns 16t..16t+15 of each packed k-block, in
    // the order of W's chunks 0..3.
    // `token` is the lane's first token; the second is 8 further.
    // Tokens from `tokens` on are zero.
    QG_DEVICE void load(XFragments& f, const u8* x, u32 token, u32 tokens, u32 lane) {
        const u32 swizzled = (lane % 4 ^ token % 8) * 16;
#pragma unroll
        for (u32 k_block = 0; k_block < STAGE_K_BLOCKS; k_block++)
#pragma unroll
            for (u32 half = 0; half < 2; half++) {
                const u32 own = token + half * 8;
                u32x4 v = {};
                if (own < tokens)
                    v = ld_shared(reinterpret_cast<const u32x4*>(x + own * STAGE_K + (swizzled ^ k_block * 64)));
                put(f, k_block, half, v);
            }
    }
    // Columns of a k-block for the lane's first or second token.
    QG_DEVICE void put(XFragments& f, u32 k_block, u32 half, const u32x4& v) {
        u32(&low)[4] = f.a[k_block * 2];
        u32(&high)[4] = f.a[k_block * 2 + 1];
        low[half] = prmt(v.x, v.z, 0x5140);
        low[half + 2] = prmt(v.x, v.z, 0x7362);
        high[half] = prmt(v.y, v.w, 0x5140);
        high[half + 2] = prmt(v.y, v.w, 0x7362);
    }
};
static_assert(STEPS == 4 && STAGE_K_BLOCKS == 2, "two steps of two k-blocks each");

// Scales of a stage: per token, and per eight rows of W.
struct StageScales {
    float x[QG_TILE_M];  // [token]
    float w[CTA_SCALES];  // [eight rows of W]

    // Starts the copies of stage `k` with COUNT threads.
    // Tokens past the last get zeros.
    template <u32 COUNT>
    QG_DEVICE void copy(StageScales& s, const Fp8GemmParams& params, u32 first_token, u32 first_row, u32 k, u32 thread) {
        const GemmParams& p = params.gemm;
        if constexpr (QG_X_BLOCK_SCALES) {
#pragma unroll
            for (u32 i = thread; i < QG_TILE_M; i += COUNT) {
                const u32 token = first_token + i;
                const bool is_there = token < p.shape.m;
                const u8* row = reinterpret_cast<const u8*>(params.x_scales) + (is_there ? token : 0) * params.x_scale_row;
                cp_async_4(reinterpret_cast<u8*>(&s.x[i]), row + (u64)k * 4, is_there ? 4 : 0);
            }
        }
        if constexpr (QG_W_BLOCK_SCALES)
            if (thread < CTA_SCALES)
                cp_async_4(reinterpret_cast<u8*>(&s.w[thread]), w_record(p, first_row + thread * SCALE_ROWS, k), 4);
    }
    // Scale record of row `row` in stage `k` of the packed weight.
    // Rows past the last use the last record.
    QG_DEVICE const u8* w_record(const GemmParams& p, u32 row, u32 k) {
        const u32 tiles = (p.shape.stored_rows + 15) / 16, tile = row / 16 < tiles ? row / 16 : tiles - 1;
        return reinterpret_cast<const u8*>(p.at.w) + ((u64)tile * p.shape.k_tiles + k) * QG_K_TILE_BYTES +
               QG_SCALE_OFFSET + row / SCALE_ROWS % 2 * 4;
    }

    // Scales of a lane's two tokens; 1 without block scales of X.
    QG_DEVICE void load_x(const StageScales& s, u32 token, float (&x)[2]) {
#pragma unroll
        for (u32 half = 0; half < 2; half++) x[half] = QG_X_BLOCK_SCALES ? ld_shared(&s.x[token + half * 8]) : 1.0f;
    }
};
static_assert(CTA_SCALES <= 32, "a warp copies them");

// Per-token scales of a lane's two tokens.
QG_DEVICE void load_token_factors(float (&factor)[2], const Fp8GemmParams& params, u32 token) {
    const u32 last = params.gemm.shape.m - 1;
#pragma unroll
    for (u32 half = 0; half < 2; half++) {
        const u32 own = token + half * 8, row = own < last ? own : last;
        factor[half] = bits_to_f32(ld_global_u32(reinterpret_cast<const u8*>(params.x_scales) + row * params.x_scale_row));
    }
}
