// Turing m16n8k8 over a k-block of 64 columns:
// acc[16 rows, 8 tokens] += scale · (codes · X)
//                           + min · Σx.
#pragma once
#include "atoms/ldmatrix.cuh"
#include "atoms/mma.cuh"
#include "mainloop/sm70/fragment_accumulators.cuh"

static_assert(!QG_MMA_M8N8K4 && QG_X_DTYPE == DTYPE_F16, "m16n8k8 takes f16, fragments of 16 rows");

struct Engine {
    // Instructions per MMA k-step of 16 columns.
    static constexpr u32 HALVES = 2;

    // A stage is one k-block.
    QG_DEVICE void accumulate(Accumulators& acc, const KTile (&k_tiles)[ROW_TILES], const XRows& x,
                              const WScales& scales, u32, u32 lane) {
        // Matrix m of an `ldmatrix` of X: columns 8m.. of eight tokens.
        const u32 x_offset = XRows::offset(lane % 8) ^ lane / 8 * 16, place = WScales::place(lane / 4);
        u32 a[ROW_TILES][K_STEPS * HALVES][2];
        f32x2 scale[ROW_TILES][PARTIALS] = {}, min[ROW_TILES][PARTIALS] = {};
#pragma unroll
        for (u32 rt = 0; rt < ROW_TILES; rt++) {
#pragma unroll
            for (u32 k_step = 0; k_step < K_STEPS * HALVES; k_step++)
#pragma unroll
                for (u32 row = 0; row < 2; row++)
                    a[rt][k_step][row] =
                        Operands::pair_f16(k_tiles[rt], quad_of(0, row, k_step / HALVES), k_step % HALVES);
#pragma unroll
            for (u32 partial = 0; partial < PARTIALS; partial++) {
                if constexpr (Operands::HAS_SCALE) scale[rt][partial] = WScales::pair(scales.scale, partial, rt, place);
                if constexpr (Operands::HAS_MIN) min[rt][partial] = WScales::pair(scales.min, partial, rt, place);
            }
        }
#pragma unroll
        for (u32 tt = 0; tt < TOKEN_TILES; tt++) {
            u32 b[K_STEPS * HALVES];
#pragma unroll
            for (u32 i = 0; i < K_STEPS * HALVES; i += 4) {
                u32 four[4];
                ldmatrix_x4(four, XRows::address(x, x_offset, i, tt));
#pragma unroll
                for (u32 m = 0; m < 4; m++) b[i + m] = four[m];
            }
#pragma unroll
            for (u32 partial = 0; partial < PARTIALS; partial++) {
                float part[ROW_TILES][4] = {};
#pragma unroll
                for (u32 i = 0; i < K_STEPS_PER_PARTIAL * HALVES; i++) {
                    const u32 k_step = partial * K_STEPS_PER_PARTIAL * HALVES + i;
#pragma unroll
                    for (u32 rt = 0; rt < ROW_TILES; rt++)
                        mma_m16n8k8_f16(Operands::HAS_SCALE ? part[rt] : acc.value[rt][tt], a[rt][k_step], b[k_step]);
                }
                f32x2 x_sum = {};
                if constexpr (Operands::HAS_MIN) x_sum = XRows::sums(x, partial, tt * 8 + lane % 4 * 2);
#pragma unroll
                for (u32 rt = 0; rt < ROW_TILES; rt++) {
                    float(&d)[4] = acc.value[rt][tt];
#pragma unroll
                    for (u32 i = 0; i < 4; i++) {
                        const bool upper = i / 2;
                        if constexpr (Operands::HAS_SCALE)
                            d[i] += (upper ? scale[rt][partial].y : scale[rt][partial].x) * part[rt][i];
                        if constexpr (Operands::HAS_MIN)
                            d[i] += (upper ? min[rt][partial].y : min[rt][partial].x) * (i % 2 ? x_sum.y : x_sum.x);
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
