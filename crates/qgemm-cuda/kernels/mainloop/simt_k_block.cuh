// FMA over a k-block in f32:
// acc[row, token] += scale · Σ code·x + min · Σx.
// For both packed layouts: Volta, f32 X, and type pairs
// that no MMA takes.
#pragma once
#include "atoms/warp.cuh"
#include "dequant/operand.cuh"
#include "mainloop/x_tile.cuh"

// Accumulators of the lane's rows and all tokens, over
// the lane's columns.
template <u32 ROW_TILES>
struct Accumulators_ {
    float value[ROW_TILES][LANE_ROWS][QG_TILE_M];  // [row tile][row][token]
};

template <u32 ROW_TILES>
struct Engine {
    using Accumulators = Accumulators_<ROW_TILES>;

    template <class Tile>
    QG_DEVICE void accumulate(Accumulators& acc, const KTile (&k_tiles)[ROW_TILES], u32 k_block, const Tile& x,
                              u32 x_k_block, u32 lane) {
#pragma unroll
        for (u32 rt = 0; rt < ROW_TILES; rt++)
#pragma unroll
            for (u32 partial = 0; partial < PARTIALS; partial++) {
                float w[LANE_ROWS][K_STEPS_PER_PARTIAL][4];
#pragma unroll
                for (u32 row = 0; row < LANE_ROWS; row++)
#pragma unroll
                    for (u32 k_step = 0; k_step < K_STEPS_PER_PARTIAL; k_step++)
                        Operands::quad_f32(k_tiles[rt], quad_of(k_block, row, partial * K_STEPS_PER_PARTIAL + k_step),
                                           w[row][k_step]);
#pragma unroll
                for (u32 token = 0; token < QG_TILE_M; token++) {
                    const f32x4* xs = reinterpret_cast<const f32x4*>(Tile::k_block(x, token, x_k_block, lane));
                    float part[LANE_ROWS] = {};
                    float x_sum = 0;
#pragma unroll
                    for (u32 k_step = 0; k_step < K_STEPS_PER_PARTIAL; k_step++) {
                        const f32x4 v = ld_shared(xs + partial * K_STEPS_PER_PARTIAL + k_step);
#pragma unroll
                        for (u32 row = 0; row < LANE_ROWS; row++) {
                            part[row] += w[row][k_step][0] * v.x;
                            part[row] += w[row][k_step][1] * v.y;
                            part[row] += w[row][k_step][2] * v.z;
                            part[row] += w[row][k_step][3] * v.w;
                        }
                        if constexpr (Operands::HAS_MIN) x_sum += (v.x + v.y) + (v.z + v.w);
                    }
#pragma unroll
                    for (u32 row = 0; row < LANE_ROWS; row++) {
                        float& d = acc.value[rt][row][token];
                        d += Operands::scale(k_tiles[rt], row, sub_block_of(k_block, partial)) * part[row];
                        if constexpr (Operands::HAS_MIN)
                            d += Operands::min(k_tiles[rt], row, sub_block_of(k_block, partial)) * x_sum;
                    }
                }
            }
    }

    // MmaM16 spreads a row's columns over four neighbouring lanes.
    // Afterwards all four hold the complete sums.
    QG_DEVICE void reduce_lanes(Accumulators& acc) {
        if constexpr (!QG_MMA_M8N8K4) {
#pragma unroll
            for (u32 rt = 0; rt < ROW_TILES; rt++)
#pragma unroll
                for (u32 row = 0; row < LANE_ROWS; row++)
#pragma unroll
                    for (u32 token = 0; token < QG_TILE_M; token++) {
                        float& v = acc.value[rt][row][token];
                        v += shfl_xor(v, 1);
                        v += shfl_xor(v, 2);
                    }
        }
    }

    // Calls `visit(row, token, value)` once per
    // accumulator of the warp.
    // Rows count from the warp's first row.
    template <class Visit>
    QG_DEVICE void for_each(Accumulators& acc, u32 lane, Visit visit) {
#pragma unroll
        for (u32 rt = 0; rt < ROW_TILES; rt++)
#pragma unroll
            for (u32 row = 0; row < LANE_ROWS; row++)
#pragma unroll
                for (u32 token = 0; token < QG_TILE_M; token++) {
                    if constexpr (QG_MMA_M8N8K4) {
                        visit(rt * 32 + lane, token, acc.value[rt][row][token]);
                    } else {
                        // Four lanes hold the sum; they alternate over tokens.
                        if (token % 4 == lane % 4)
                            visit(rt * 16 + lane / 4 + row * 8, token, acc.value[rt][row][token]);
                    }
                }
    }
};
