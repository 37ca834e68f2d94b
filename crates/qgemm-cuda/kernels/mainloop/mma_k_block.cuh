// MMA over a k-block of 64 columns, for 16 rows and 8 tokens:
// acc += scale · (codes · X) + min · Σx.
// Codes are exact in f16 and bf16: no weight is rounded.
#pragma once
#include "mainloop/mma_operand.cuh"
#include "mainloop/x_tile.cuh"

static_assert(QG_TILE_M % MMA_TOKENS == 0 || MMA_TOKENS % QG_TILE_M == 0, "tokens fill or divide an instruction");
// Token tiles, rounded up to whole instructions.
constexpr u32 TOKEN_TILES = (QG_TILE_M + MMA_TOKENS - 1) / MMA_TOKENS;

// Accumulators of a warp: ROW_TILES × 16 rows, all tokens.
// value[rt][tt]: D registers of one instruction.
template <u32 ROW_TILES>
struct Accumulators_ {
    float value[ROW_TILES][TOKEN_TILES][4];
};

template <u32 ROW_TILES>
struct Engine {
    using Accumulators = Accumulators_<ROW_TILES>;

    template <class Tile>
    QG_DEVICE void accumulate(Accumulators& acc, const KTile (&k_tiles)[ROW_TILES], u32 k_block, const Tile& x,
                              u32 x_k_block, u32 lane) {
        u32 a[ROW_TILES][K_STEPS][4];
#pragma unroll
        for (u32 rt = 0; rt < ROW_TILES; rt++)
#pragma unroll
            for (u32 k_step = 0; k_step < K_STEPS; k_step++)
#pragma unroll
                for (u32 i = 0; i < 4; i++)
                    a[rt][k_step][i] = operand_pair(k_tiles[rt], quad_of(k_block, i % 2, k_step), i / 2);

#pragma unroll
        for (u32 tt = 0; tt < TOKEN_TILES; tt++) {
            // Instruction columns past the tile's tokens repeat its tokens.
            // Their accumulators are ignored.
            const u32 token = tt * MMA_TOKENS + lane / 4 % (QG_TILE_M < MMA_TOKENS ? QG_TILE_M : MMA_TOKENS);
            const u32x4* row = reinterpret_cast<const u32x4*>(Tile::k_block(x, token, x_k_block, lane));
            const u32x4 b[2] = {ld_shared(row), ld_shared(row + 1)};
            const u32 bs[K_STEPS][2] = {{b[0].x, b[0].y}, {b[0].z, b[0].w}, {b[1].x, b[1].y}, {b[1].z, b[1].w}};
#pragma unroll
            for (u32 partial = 0; partial < PARTIALS; partial++) {
                // A matrix of ones gives each token's X block sum in every
                // row; the minimum needs it.
                float x_sum[4] = {};
                if constexpr (Operands::HAS_MIN) {
                    const u32 ones[4] = {ONE_PAIR, ONE_PAIR, ONE_PAIR, ONE_PAIR};
#pragma unroll
                    for (u32 i = 0; i < K_STEPS_PER_PARTIAL; i++)
                        mma_k_step(x_sum, ones, bs[partial * K_STEPS_PER_PARTIAL + i]);
                }
#pragma unroll
                for (u32 rt = 0; rt < ROW_TILES; rt++) {
                    float(&d)[4] = acc.value[rt][tt];
                    if constexpr (!Operands::HAS_SCALE) {
#pragma unroll
                        for (u32 k_step = 0; k_step < K_STEPS; k_step++) mma_k_step(d, a[rt][k_step], bs[k_step]);
                    } else {
                        float part[4] = {};
#pragma unroll
                        for (u32 i = 0; i < K_STEPS_PER_PARTIAL; i++) {
                            const u32 k_step = partial * K_STEPS_PER_PARTIAL + i;
                            mma_k_step(part, a[rt][k_step], bs[k_step]);
                        }
#pragma unroll
                        for (u32 row = 0; row < 2; row++) {
                            const float scale = Operands::scale(k_tiles[rt], row, sub_block_of(k_block, partial));
#pragma unroll
                            for (u32 i = 0; i < 2; i++) d[row * 2 + i] += scale * part[row * 2 + i];
                            if constexpr (Operands::HAS_MIN) {
                                const float min = Operands::min(k_tiles[rt], row, sub_block_of(k_block, partial));
#pragma unroll
                                for (u32 i = 0; i < 2; i++) d[row * 2 + i] += min * x_sum[i];
                            }
                        }
                    }
                }
            }
        }
    }

    // Calls `visit(row, token, value)` for this lane's accumulators.
    // Rows count from the warp's first row.
    template <class Visit>
    QG_DEVICE void for_each(Accumulators& acc, u32 lane, Visit visit) {
#pragma unroll
        for (u32 rt = 0; rt < ROW_TILES; rt++)
#pragma unroll
            for (u32 tt = 0; tt < TOKEN_TILES; tt++)
#pragma unroll
                for (u32 i = 0; i < 4; i++) {
                    const u32 token = tt * MMA_TOKENS + lane % 4 * 2 + i % 2;
                    if (QG_TILE_M % MMA_TOKENS == 0 || token < QG_TILE_M)
                        visit(rt * 16 + lane / 4 + i / 2 * 8, token, acc.value[rt][tt][i]);
                }
    }

    QG_DEVICE void reduce_lanes(Accumulators&) {}
};
