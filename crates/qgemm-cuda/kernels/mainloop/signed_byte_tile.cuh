// The product of a warp with signed bytes: ROW_TILES x 16 rows of W and all tokens of the CTA, a k-block at a time. Sums of codes are
// exact in s32; wherever a scale of W or of X ends they are added to accumulators in f32, with both scales. Minimums act on sums of
// X's codes, which threads made that put them in order.
#pragma once
#include "atoms/mma_s8.cuh"
#include "dequant/signed_bytes.cuh"
#include "mainloop/signed_byte_ring.cuh"
#include "mainloop/warp_tile.cuh"

// Columns after which sums are scaled, and how often in a k-block.
constexpr u32 SUM_K = X_SCALES > 0 && PARTIAL_K > X_SCALE_COLUMNS ? X_SCALE_COLUMNS : PARTIAL_K;
constexpr u32 SUMS = K_BLOCK / SUM_K;
constexpr u32 SUM_K_STEPS = SUM_K / K_STEP;

// Token tiles that are multiplied side by side.
constexpr u32 TILES_AT_ONCE = 2;

// Zero, which depends on the accumulators of the token tile TILES_AT_ONCE before `tt`. Else the compiler begins all tiles at once,
// for which there are no registers. `none` is zero, which the compiler must not know.
QG_DEVICE u32 after(const Accumulators& acc, u32 tt, u32 none) {
    return tt < TILES_AT_ONCE ? 0 : f32_to_bits(acc.value[ROW_TILES - 1][tt - TILES_AT_ONCE][3]) & none;
}

// d += A . B over `SUM_K_STEPS` k-steps from `first` on.
QG_DEVICE void mma_sum(i32 (&d)[4], const u32 (&a)[K_STEPS][2], const u32 (&b)[K_STEPS], u32 first) {
    if constexpr (SUM_K_STEPS == 1) {
        mma_m16n8k16_s8(d, a[first], b[first]);
    } else {
#pragma unroll
        for (u32 i = first; i < first + SUM_K_STEPS; i += 2)
            mma_m16n8k32_s8(d, {a[i][0], a[i][1], a[i + 1][0], a[i + 1][1]}, {b[i], b[i + 1]});
    }
}

// Sums of X's codes of the lane's two tokens: of the chunks of a k-block.
struct SumsOfX {
    float chunk[2][X_CHUNKS];

    QG_DEVICE void load(SumsOfX& sums, const ByteStage& x, u32 tt, u32 lane) {
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
            const u32 token = tt * MMA_TOKENS + lane % 4 * 2 + i;
            const f32x4 v = ld_shared(reinterpret_cast<const f32x4*>(&x.sum[token * X_CHUNKS]));
            sums.chunk[i][0] = v.x, sums.chunk[i][1] = v.y, sums.chunk[i][2] = v.z, sums.chunk[i][3] = v.w;
        }
    }
    // Over `SUM_K_STEPS` k-steps from `first` on; exact.
    QG_DEVICE float of(const SumsOfX& sums, u32 token, u32 first) {
        float sum = sums.chunk[token][first];
#pragma unroll
        for (u32 i = 1; i < SUM_K_STEPS; i++) sum += sums.chunk[token][first + i];
        return sum;
    }
};

// The A operands of a k-block of one row tile, with what its sums are scaled by and what is added.
struct ByteRows {
    u32 a[K_STEPS][2];
    float scale[SUMS][2], min[SUMS][2];

    QG_DEVICE void load(ByteRows& rows, const KTile& k_tile, u32 k_block) {
#pragma unroll
        for (u32 row = 0; row < 2; row++) {
#pragma unroll
            for (u32 k_step = 0; k_step < K_STEPS; k_step++) {
                const u32 sub = sub_block_of(k_block, k_step * K_STEP / PARTIAL_K);
                rows.a[k_step][row] = SignedBytes::of_quad(k_tile, quad_of(k_block, row, k_step), row, sub);
            }
#pragma unroll
            for (u32 sum = 0; sum < SUMS; sum++) {
                const u32 sub = sub_block_of(k_block, sum * SUM_K / PARTIAL_K);
                rows.scale[sum][row] = SignedBytes::scale(k_tile, row, sub);
                rows.min[sum][row] = SignedBytes::min(k_tile, row, sub);
            }
        }
    }
};

// acc += W . X over a k-block.
QG_DEVICE void accumulate_bytes(Accumulators& acc, const ByteRows (&rows)[ROW_TILES], const ByteStage& x,
                                const ByteCursor& cursor, u32 lane, u32 none) {
#pragma unroll
    for (u32 tt = 0; tt < TOKEN_TILES; tt++) {
        u32 b[K_STEPS];
        ByteCursor::load(cursor, x, tt, after(acc, tt, none), b);
        // Scales of the lane's two tokens, those of a token beside one another.
        float x_scale[2][2] = {{1.0f, 1.0f}, {1.0f, 1.0f}};
        if constexpr (X_SCALES > 0) {
            const f32x4 v =
                ld_shared(reinterpret_cast<const f32x4*>(&x.scale[(tt * MMA_TOKENS + lane % 4 * 2) * X_SCALES]));
            x_scale[0][0] = v.x, x_scale[0][1] = v.y, x_scale[1][0] = v.z, x_scale[1][1] = v.w;
        }
        [[maybe_unused]] SumsOfX sums;
        if constexpr (SignedBytes::HAS_MIN) SumsOfX::load(sums, x, tt, lane);
#pragma unroll
        for (u32 sum = 0; sum < SUMS; sum++) {
            const u32 half = sum * SUM_K / X_SCALE_COLUMNS;
            [[maybe_unused]] float sum_x[2];
            if constexpr (SignedBytes::HAS_MIN) {
#pragma unroll
                for (u32 i = 0; i < 2; i++) sum_x[i] = SumsOfX::of(sums, i, sum * SUM_K_STEPS) * x_scale[i][half];
            }
#pragma unroll
            for (u32 rt = 0; rt < ROW_TILES; rt++) {
                i32 d[4] = {0, 0, 0, 0};
                mma_sum(d, rows[rt].a, b, sum * SUM_K_STEPS);
#pragma unroll
                for (u32 i = 0; i < 4; i++) {
                    float& to = acc.value[rt][tt][i];
                    if constexpr (X_SCALES > 0 && Operands::HAS_SCALE)
                        to = fma_f32(rows[rt].scale[sum][i / 2] * x_scale[i % 2][half], (float)d[i], to);
                    else if constexpr (X_SCALES > 0)
                        to = fma_f32(x_scale[i % 2][half], (float)d[i], to);
                    else if constexpr (Operands::HAS_SCALE)
                        to = fma_f32(rows[rt].scale[sum][i / 2], (float)d[i], to);
                    else
                        to += (float)d[i];
                    if constexpr (SignedBytes::HAS_MIN) to = fma_f32(rows[rt].min[sum][i / 2], sum_x[i % 2], to);
                }
            }
        }
    }
}
