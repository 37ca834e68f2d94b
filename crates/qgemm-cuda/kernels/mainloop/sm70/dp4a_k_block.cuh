// Volta dp4a over a k-block of 32 columns.
// Volta has no integer MMA.
// A lane has a row of W (the packed layout) and all tokens:
// acc[32 rows, tokens] += scale · x_scale · (codes · X)
//                         + min · Σx.
// X is the same for all lanes of a warp, so one load
// broadcasts 16 columns.
// Sums of codes are exact in s32.
#pragma once
#include "mainloop/scaled_sum.cuh"
#include "mainloop/sm70/w_stream.cuh"

static_assert(QG_MMA_M8N8K4 && K_STEPS == 8, "a lane has a row of W");

struct Accumulators {
    float value[ROW_TILES][QG_TILE_M];  // [row tile][token]
};

struct Engine {
    // Multiplies k-block `k_block` of the stage.
    QG_DEVICE void accumulate(Accumulators& acc, const KTile (&k_tiles)[ROW_TILES], const XRows& x, const WScales& scales,
                              u32 k_block, u32 lane) {
        constexpr u32 CHUNKS = K_BLOCK / X_CHUNK;
        const u32 place = WScales::place(lane);
        const i32 zero = sum_zero();
        u32 a[ROW_TILES][K_STEPS];
        SumFactor scale[ROW_TILES][SUMS];
        float min[ROW_TILES][SUMS];
#pragma unroll
        for (u32 rt = 0; rt < ROW_TILES; rt++) {
#pragma unroll
            for (u32 k_step = 0; k_step < K_STEPS; k_step++)
                a[rt][k_step] = SignedBytes::of_quad(k_tiles[rt], quad_of(0, 0, k_step), 0, k_step * K_STEP / QG_SUB_BLOCK);
#pragma unroll
            for (u32 sum = 0; sum < SUMS; sum++) {
                const u32 sub = sub_block_of_sum(k_block, sum);
                scale[rt][sum] = SumFactor::of(RowTerms::HAS_SCALE ? WScales::one(scales.scale, sub, rt, place) : 1.0f);
                min[rt][sum] = RowTerms::HAS_MIN ? WScales::one(scales.min, sub, rt, place) : 0.0f;
            }
        }
#pragma unroll
        for (u32 token = 0; token < QG_TILE_M; token++) {
            u32 b[K_STEPS];
#pragma unroll
            for (u32 chunk = 0; chunk < CHUNKS; chunk++) {
                const u32x4 v = ld_shared(
                    reinterpret_cast<const u32x4*>(x.codes + XRows::place(token, k_block * CHUNKS + chunk)));
                b[chunk * 4] = v.x, b[chunk * 4 + 1] = v.y, b[chunk * 4 + 2] = v.z, b[chunk * 4 + 3] = v.w;
            }
#pragma unroll
            for (u32 sum = 0; sum < SUMS; sum++) {
                const u32 column = k_block * K_BLOCK + sum * SUM_K;
                const float x_scale = XRows::scale_of(x, token, column);
                float x_sum = 0;
                if constexpr (RowTerms::HAS_MIN) x_sum = XRows::sum_of(x, token, column) * x_scale;
#pragma unroll
                for (u32 rt = 0; rt < ROW_TILES; rt++) {
                    i32 part = zero;
#pragma unroll
                    for (u32 i = 0; i < SUM_K_STEPS; i++)
                        part = dp4a((i32)a[rt][sum * SUM_K_STEPS + i], (i32)b[sum * SUM_K_STEPS + i], part);
                    float& d = acc.value[rt][token];
                    d = add_sum(d, scale[rt][sum], x_scale, part);
                    if constexpr (RowTerms::HAS_MIN) d = fma_f32(min[rt][sum], x_sum, d);
                }
            }
        }
    }

    // Calls `visit(row, token, value)` for this lane's accumulators.
    // Rows count from the warp's first row.
    template <class Visit>
    QG_DEVICE void for_each(const Accumulators& acc, u32 lane, Visit visit) {
#pragma unroll
        for (u32 rt = 0; rt < ROW_TILES; rt++)
#pragma unroll
            for (u32 token = 0; token < QG_TILE_M; token++) visit(rt * 32 + lane, token, acc.value[rt][token]);
    }
};
