// s8 product of a warp: ROW_TILES × 16 rows of W, all tokens,
// one k-block at a time.
// Sums of codes are exact in s32.
// Where a scale of W or X ends, both scales are applied and
// the result is added to f32 accumulators.
// Minimums multiply sums of X's codes, in a separate tf32 MMA.
// The threads that permute X compute these sums.
#pragma once
#include "atoms/mma.cuh"
#include "atoms/mma_s8.cuh"
#include "dequant/signed_bytes.cuh"
#include "mainloop/scaled_sum.cuh"
#include "mainloop/signed_byte_ring.cuh"
#include "mainloop/warp_tile.cuh"

// Token tiles in flight, limited by registers.
// The compiler uses more registers on Hopper and Blackwell.
constexpr u32 TILES_AT_ONCE = SUMS == 4 ? 2 : SignedBytes::HAS_MIN || (X_SCALES > 0 && QG_VARIANT >= 90) ? 4 : 8;

// Zero that depends on token tile `tt` - TILES_AT_ONCE.
// Without the dependency the compiler starts all tiles at once.
// `none` is 0, but opaque to the compiler.
QG_DEVICE u32 after(const Accumulators& acc, u32 tt, u32 none) {
    return tt < TILES_AT_ONCE ? 0 : f32_to_bits(acc.value[ROW_TILES - 1][tt - TILES_AT_ONCE][3]) & none;
}

// Initial value of sums, in shared registers.
struct SumZero {
    i32 value[4];

    QG_DEVICE SumZero make() {
        SumZero zero;
#pragma unroll
        for (u32 i = 0; i < 4; i++) zero.value[i] = sum_zero();
        return zero;
    }
};

// d += A · B over SUM_K_STEPS k-steps from `first` on.
QG_DEVICE void mma_sum(i32 (&d)[4], const u32 (&a)[K_STEPS][2], const u32 (&b)[K_STEPS], u32 first) {
    if constexpr (SUM_K_STEPS == 1) {
        mma_m16n8k16_s8(d, a[first], b[first]);
    } else {
#pragma unroll
        for (u32 i = first; i < first + SUM_K_STEPS; i += 2)
            mma_m16n8k32_s8(d, {a[i][0], a[i][1], a[i + 1][0], a[i + 1][1]}, {b[i], b[i + 1]});
    }
}

// Minimums of a row tile as a tf32 operand.
// Its columns are the words of X (`store_sum`), twice.
// The upper part of a minimum multiplies both parts of its
// sum, the lower part only the upper.
// A lane holds word lane % 4.
struct MinOperand {
    u32 upper[2], lower[2];

    // `min`: minimums of the lane's rows.
    QG_DEVICE void set(MinOperand& operand, const float (&min)[SUMS][2], u32 lane) {
        const u32 word = lane % K_BLOCK_CHUNKS;
#pragma unroll
        for (u32 row = 0; row < 2; row++) {
            // No dynamic index: it would move the array to local memory.
            u32 bits = f32_to_bits(min[0][row]);
#pragma unroll
            for (u32 i = 1; i < SUMS; i++) {
                const u32 of_sum = f32_to_bits(min[i][row]);
                bits = word / SUM_WORDS == i ? of_sum : bits;
            }
            const float value = bits_to_f32(bits), upper = tf32_part(value);
            operand.upper[row] = word % SUM_WORDS < 2 ? f32_to_bits(upper) : 0;
            operand.lower[row] = word % SUM_WORDS == 0 ? f32_to_bits(value - upper) : 0;
        }
    }

    // acc += minimums · sums; `words` are the lane's words of X.
    QG_DEVICE void multiply(float (&acc)[4], const MinOperand& operand, const u32 (&words)[SUM_PASSES]) {
        const u32 a[4] = {operand.upper[0], operand.upper[1], operand.lower[0], operand.lower[1]};
        mma_m16n8k8_tf32(acc, a, {words[0], words[0]});
        if constexpr (SUM_PASSES == 2) mma_m16n8k8_tf32(acc, {a[0], a[1], 0, 0}, {words[1], words[1]});
    }
};

// A operands of a k-block of one row tile, scales and minimums.
struct ByteRows {
    u32 a[K_STEPS][2];
    SumFactor scale[SUMS][2];
    MinOperand min;

    QG_DEVICE void load(ByteRows& rows, const KTile& k_tile, u32 k_block, u32 lane, u32 none) {
        float min[SUMS][2];
#pragma unroll
        for (u32 row = 0; row < 2; row++) {
#pragma unroll
            for (u32 k_step = 0; k_step < K_STEPS; k_step++) {
                const u32 sub = sub_block_of(k_block, k_step * K_STEP / PARTIAL_K);
                rows.a[k_step][row] = SignedBytes::of_quad(k_tile, quad_of(k_block, row, k_step), row, sub, none);
            }
#pragma unroll
            for (u32 sum = 0; sum < SUMS; sum++) {
                const u32 sub = sub_block_of(k_block, sum * SUM_K / PARTIAL_K);
                rows.scale[sum][row] = SumFactor::of(SignedBytes::scale(k_tile, row, sub));
                min[sum][row] = SignedBytes::min(k_tile, row, sub);
            }
        }
        if constexpr (SignedBytes::HAS_MIN) MinOperand::set(rows.min, min, lane);
    }
};

// acc += W · X over k-block `k_block` of a stage.
QG_DEVICE void accumulate_bytes(Accumulators& acc, const ByteRows (&rows)[ROW_TILES], const ByteStage& x, u32 k_block,
                                const ByteCursor& cursor, const SumZero& zero, u32 lane, u32 none) {
#pragma unroll
    for (u32 tt = 0; tt < TOKEN_TILES; tt++) {
        u32 b[K_STEPS];
        ByteCursor::load(cursor, x, k_block, tt, after(acc, tt, none), b);
        // Scales of the lane's two tokens; a token's
        // scales are adjacent.
        float x_scale[2][2] = {{1.0f, 1.0f}, {1.0f, 1.0f}};
        if constexpr (X_SCALES > 0) {
            const f32x4 v =
                ld_shared(reinterpret_cast<const f32x4*>(&x.scale[k_block][(tt * MMA_TOKENS + lane % 4 * 2) * X_SCALES]));
            x_scale[0][0] = v.x, x_scale[0][1] = v.y, x_scale[1][0] = v.z, x_scale[1][1] = v.w;
        }
        if constexpr (SignedBytes::HAS_MIN) {
            u32 words[SUM_PASSES];
#pragma unroll
            for (u32 i = 0; i < SUM_PASSES; i++)
                words[i] = f32_to_bits(
                    ld_shared(&x.sum[k_block][(i * QG_TILE_M + tt * MMA_TOKENS) * K_BLOCK_CHUNKS + lane]));
#pragma unroll
            for (u32 rt = 0; rt < ROW_TILES; rt++) MinOperand::multiply(acc.value[rt][tt], rows[rt].min, words);
        }
#pragma unroll
        for (u32 sum = 0; sum < SUMS; sum++) {
            const u32 half = sum * SUM_K / X_SCALE_COLUMNS;
#pragma unroll
            for (u32 rt = 0; rt < ROW_TILES; rt++) {
                i32 d[4] = {zero.value[0], zero.value[1], zero.value[2], zero.value[3]};
                mma_sum(d, rows[rt].a, b, sum * SUM_K_STEPS);
#pragma unroll
                for (u32 i = 0; i < 4; i++) {
                    float& to = acc.value[rt][tt][i];
                    to = add_sum(to, rows[rt].scale[sum][i / 2], x_scale[i % 2][half], d[i]);
                }
            }
        }
    }
}

// Multiplies sums by token scales.
// The tile starts at the problem's first row.
QG_DEVICE void scale_tokens(Accumulators& acc, const SignedByteParams& given, u32 lane) {
#pragma unroll
    for (u32 tt = 0; tt < TOKEN_TILES; tt++) {
        const u32 token = tt * MMA_TOKENS + lane % 4 * 2;
        const float scale[2] = {scale_of_row(given, token), scale_of_row(given, token + 1)};
#pragma unroll
        for (u32 rt = 0; rt < ROW_TILES; rt++)
#pragma unroll
            for (u32 i = 0; i < 4; i++) acc.value[rt][tt][i] *= scale[i % 2];
    }
}
