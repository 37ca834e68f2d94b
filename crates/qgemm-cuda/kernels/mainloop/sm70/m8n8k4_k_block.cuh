// Volta m8n8k4 over a k-block of 32 columns:
// acc[32 rows, 8 tokens] += scale · (codes · X)
//                           + min · Σx.
//
// m8n8k4 is four 8×8×4 products. Each has eight rows of W; all
// have the same eight tokens.
// Lane l holds row l of a tile, as the packed layout does, and
// columns of token l%4 + 4·(l/16).
// Product p = l%16/4 has rows 4p.. and 16+4p...
// Lane l gets the accumulators of rows r and r + 2
// (see `first_row`).
#pragma once
#include "atoms/mma.cuh"
#include "mainloop/sm70/w_stream.cuh"

static_assert(QG_MMA_M8N8K4 && QG_X_DTYPE == DTYPE_F16, "m8n8k4 takes f16, a row of W in a lane");
static_assert(QG_TILE_M % 8 == 0, "tokens fill the instruction");
constexpr u32 TOKEN_TILES = QG_TILE_M / 8;

// value[rt][tt][i]: D registers of one instruction.
struct Accumulators {
    float value[ROW_TILES][TOKEN_TILES][8];  // [row tile][token tile][register]
};

struct Engine {
    // MMA k-steps per load of X.
    static constexpr u32 GROUP_K_STEPS = GROUP / K_STEP;

    QG_DEVICE u32 first_row(u32 lane) {
        return lane % 16 / 4 * 4 + lane % 2 + lane / 16 * 16;
    }
    // Token of accumulator i; accumulator i + 4 is 4 tokens further.
    QG_DEVICE u32 first_token(u32 lane) {
        return lane & 2;
    }

    // Multiplies k-block `k_block` of the stage.
    QG_DEVICE void accumulate(Accumulators& acc, const KTile (&k_tiles)[ROW_TILES], const XRows& x,
                              const WScales& scales, u32 k_block, u32 lane) {
        const u32 x_offset = XRows::offset(lane % 4 + lane / 16 * 4) ^ k_block * (K_BLOCK / GROUP * 16);
        const u32 place = WScales::place(first_row(lane));
#pragma unroll
        for (u32 partial = 0; partial < PARTIALS; partial++) {
            const u32 first_quad = partial * K_STEPS_PER_PARTIAL;
            const u32 sub = (k_block * PARTIALS + partial) * STAGE_SUBS / (STAGE_K_BLOCKS * PARTIALS);
            u32 a[ROW_TILES][K_STEPS_PER_PARTIAL][2];
            f32x2 scale[ROW_TILES] = {}, min[ROW_TILES] = {};
#pragma unroll
            for (u32 rt = 0; rt < ROW_TILES; rt++) {
#pragma unroll
                for (u32 k_step = 0; k_step < K_STEPS_PER_PARTIAL; k_step++)
#pragma unroll
                    for (u32 pair = 0; pair < 2; pair++)
                        a[rt][k_step][pair] = Operands::pair_f16(k_tiles[rt], first_quad + k_step, pair);
                if constexpr (Operands::HAS_SCALE) scale[rt] = WScales::pair(scales.scale, sub, rt, place);
                if constexpr (Operands::HAS_MIN) min[rt] = WScales::pair(scales.min, sub, rt, place);
            }
#pragma unroll
            for (u32 tt = 0; tt < TOKEN_TILES; tt++) {
                float part[ROW_TILES][8] = {};
#pragma unroll
                for (u32 k_step = 0; k_step < K_STEPS_PER_PARTIAL; k_step += GROUP_K_STEPS) {
                    const u32x4 v = ld_shared(reinterpret_cast<const u32x4*>(
                        XRows::address(x, x_offset, (first_quad + k_step) / GROUP_K_STEPS, tt)));
                    const u32 b[GROUP_K_STEPS][2] = {{v.x, v.y}, {v.z, v.w}};
#pragma unroll
                    for (u32 i = 0; i < GROUP_K_STEPS; i++)
#pragma unroll
                        for (u32 rt = 0; rt < ROW_TILES; rt++)
                            mma_m8n8k4_f16(Operands::HAS_SCALE ? part[rt] : acc.value[rt][tt], a[rt][k_step + i], b[i]);
                }
                if constexpr (Operands::HAS_SCALE) apply(acc, part, scale, tt);
                if constexpr (Operands::HAS_MIN) {
                    // Once in a sub-block of several k-blocks.
                    if (QG_SUB_BLOCK > K_BLOCK && k_block * K_BLOCK % QG_SUB_BLOCK != 0) continue;
                    const u32 token = tt * 8 + first_token(lane);
                    const f32x2 low = XRows::sums(x, sub, token), high = XRows::sums(x, sub, token + 4);
                    const float x_sum[4] = {low.x, low.y, high.x, high.y};
                    float spread[ROW_TILES][8];
#pragma unroll
                    for (u32 rt = 0; rt < ROW_TILES; rt++)
#pragma unroll
                        for (u32 i = 0; i < 8; i++) spread[rt][i] = x_sum[i / 4 * 2 + i % 2];
                    apply(acc, spread, min, tt);
                }
            }
        }
    }

    // acc += factor · values, with a factor per row of the lane.
    QG_DEVICE void apply(Accumulators& acc, const float (&values)[ROW_TILES][8], const f32x2 (&factor)[ROW_TILES],
                         u32 tt) {
#pragma unroll
        for (u32 rt = 0; rt < ROW_TILES; rt++)
#pragma unroll
            for (u32 i = 0; i < 8; i++)
                acc.value[rt][tt][i] += (i & 2 ? factor[rt].y : factor[rt].x) * values[rt][i];
    }

    // Calls `visit(row, token, value)` for this lane's accumulators.
    // Half of the lanes visit their two rows in reverse order:
    // a warp's stores of neighbouring rows then reach all banks.
    template <class Visit>
    QG_DEVICE void for_each(const Accumulators& acc, u32 lane, Visit visit) {
        const bool swap = lane & 2;
#pragma unroll
        for (u32 rt = 0; rt < ROW_TILES; rt++)
#pragma unroll
            for (u32 tt = 0; tt < TOKEN_TILES; tt++)
#pragma unroll
                for (u32 i = 0; i < 8; i++)
                    visit(rt * 32 + first_row(lane) + ((i & 2) ^ (swap ? 2 : 0)),
                          tt * 8 + first_token(lane) + (i & 4) + i % 2,
                          swap ? acc.value[rt][tt][i ^ 2] : acc.value[rt][tt][i]);
    }
};
