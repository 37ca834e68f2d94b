// Turing integer m8n8k16 over a k-block of 64 columns:
// acc[16 rows, 8 tokens] += scale · x_scale · (codes · X)
//                           + min · Σx.
// Sums of codes are exact in s32.
#pragma once
#include "atoms/ldmatrix.cuh"
#include "atoms/mma_s8.cuh"
#include "mainloop/scaled_sum.cuh"
#include "mainloop/sm70/fragment_accumulators.cuh"

static_assert(!QG_MMA_M8N8K4, "fragments of 16 rows");

struct Engine {
    // A stage is one k-block.
    QG_DEVICE void accumulate(Accumulators& acc, const KTile (&k_tiles)[ROW_TILES], const XRows& x, const WScales& scales, u32,
                              u32 lane) {
        const u32 place = WScales::place(lane / 4);
        const i32 zero[2] = {sum_zero(), sum_zero()};
        u32 a[ROW_TILES][K_STEPS][2];
        SumFactor scale[ROW_TILES][SUMS][2] = {};
        f32x2 min[ROW_TILES][SUMS] = {};
#pragma unroll
        for (u32 rt = 0; rt < ROW_TILES; rt++) {
#pragma unroll
            for (u32 k_step = 0; k_step < K_STEPS; k_step++)
#pragma unroll
                for (u32 row = 0; row < 2; row++)
                    a[rt][k_step][row] =
                        SignedBytes::of_quad(k_tiles[rt], quad_of(0, row, k_step), row, k_step * K_STEP / QG_SUB_BLOCK);
#pragma unroll
            for (u32 sum = 0; sum < SUMS; sum++) {
                const u32 sub = sub_block_of_sum(0, sum);
                if constexpr (RowTerms::HAS_SCALE) {
                    const f32x2 of_rows = WScales::pair(scales.scale, sub, rt, place);
                    scale[rt][sum][0] = SumFactor::of(of_rows.x), scale[rt][sum][1] = SumFactor::of(of_rows.y);
                }
                if constexpr (RowTerms::HAS_MIN) min[rt][sum] = WScales::pair(scales.min, sub, rt, place);
            }
        }
#pragma unroll
        for (u32 tt = 0; tt < TOKEN_TILES; tt++) {
            // Matrix m of the `ldmatrix`: k-step m of eight tokens.
            u32 b[K_STEPS];
            ldmatrix_x4(b, shared_address(x.codes) + XRows::place(tt * 8 + lane % 8, lane / 8));
#pragma unroll
            for (u32 sum = 0; sum < SUMS; sum++) {
                float x_scale[2], x_sum[2] = {};
#pragma unroll
                for (u32 i = 0; i < 2; i++) {
                    const u32 token = tt * 8 + lane % 4 * 2 + i, column = sum * SUM_K;
                    x_scale[i] = XRows::scale_of(x, token, column);
                    if constexpr (RowTerms::HAS_MIN) x_sum[i] = XRows::sum_of(x, token, column) * x_scale[i];
                }
#pragma unroll
                for (u32 rt = 0; rt < ROW_TILES; rt++) {
                    i32 part[2][2] = {{zero[0], zero[1]}, {zero[0], zero[1]}};
#pragma unroll
                    for (u32 i = 0; i < SUM_K_STEPS; i++) {
                        const u32 k_step = sum * SUM_K_STEPS + i;
#pragma unroll
                        for (u32 row = 0; row < 2; row++) mma_m8n8k16_s8(part[row], a[rt][k_step][row], b[k_step]);
                    }
#pragma unroll
                    for (u32 i = 0; i < 4; i++) {
                        const bool upper = i / 2;
                        float& d = acc.value[rt][tt][i];
                        d = add_sum(d, scale[rt][sum][upper], x_scale[i % 2], part[upper][i % 2]);
                        if constexpr (RowTerms::HAS_MIN)
                            d = fma_f32(upper ? min[rt][sum].y : min[rt][sum].x, x_sum[i % 2], d);
                    }
                }
            }
        }
    }

    template <class Visit>
    QG_DEVICE void for_each(const Accumulators& acc, u32 lane, Visit visit) {
        Accumulators::for_each(acc, lane, visit);
    }
};
static_assert(K_STEPS == 4, "one access of X brings the k-steps of a k-block");
