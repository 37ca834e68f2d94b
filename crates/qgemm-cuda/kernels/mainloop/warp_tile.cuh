// MMA product of a warp: ROW_TILES × 16 rows of W, all tokens.
// Both come from shared memory, one k-block at a time.
//
// Scale and minimum act on codes in registers, and each weight
// is rounded once to the type of X.
// So one set of accumulators suffices, and the cost of
// dequantization does not grow with M.
#pragma once
#include "atoms/float.cuh"
#include "mainloop/mma_operand.cuh"
#include "mainloop/row_tiles.cuh"
#include "mainloop/x_ring.cuh"

constexpr u32 TOKEN_TILES = QG_TILE_M / MMA_TOKENS;
static_assert(TOKEN_TILES * MMA_TOKENS == QG_TILE_M && TOKEN_TILES % 2 == 0, "tokens fill instructions, two at a time");

// value[rt][tt]: D registers of one instruction.
struct Accumulators {
    float value[ROW_TILES][TOKEN_TILES][4];  // [row tile][token tile][register]
};

// Scale and minimum of a row, as factors of operand pairs.
struct RowFactor {
#if QG_X_DTYPE == 1
    u32 scale, min;

    QG_DEVICE RowFactor of(const KTile& k_tile, u32 row, u32 sub) {
        const float min = Operands::min(k_tile, row, sub);
        return {Operands::scale_f16x2(k_tile, row, sub), f32_to_f16x2(min, min)};
    }
    QG_DEVICE u32 weights(const RowFactor& f, const KTile& k_tile, u32 quad, u32 pair) {
        const u32 codes = Operands::pair_f16(k_tile, quad, pair);
        return Operands::HAS_MIN ? fma_f16x2(codes, f.scale, f.min) : mul_f16x2(codes, f.scale);
    }
#else
    float scale, min;

    QG_DEVICE RowFactor of(const KTile& k_tile, u32 row, u32 sub) {
        return {Operands::scale(k_tile, row, sub), Operands::min(k_tile, row, sub)};
    }
    QG_DEVICE u32 weights(const RowFactor& f, const KTile& k_tile, u32 quad, u32 pair) {
        const u32 codes = Operands::pair_f16(k_tile, quad, pair);
        const float low = f16_to_f32(codes & 0xffffu), high = f16_to_f32(codes >> 16);
        return f32_to_bf16x2(low * f.scale + f.min, high * f.scale + f.min);
    }
#endif
};

// acc += A · X over the columns of k-step `k_step`.
QG_DEVICE void multiply_k_step(Accumulators& acc, const u32 (&a)[ROW_TILES][4], const XStage& x, const XCursor& cursor,
                               u32 k_step) {
#pragma unroll
    for (u32 tt = 0; tt < TOKEN_TILES; tt += 2) {
        u32 b[2][2];
        XCursor::load_two_tiles(cursor, x, k_step, tt, b);
#pragma unroll
        for (u32 rt = 0; rt < ROW_TILES; rt++) {
            mma_k_step(acc.value[rt][tt], a[rt], b[0]);
            mma_k_step(acc.value[rt][tt + 1], a[rt], b[1]);
        }
    }
}

// A operand of k-step `k_step`: weights rounded
// to the type of X.
// `factor` persists between calls.
QG_DEVICE void rounded_weights(u32 (&a)[4], RowFactor (&factor)[2], const KTile& k_tile, u32 k_block, u32 k_step) {
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
        const u32 quad = quad_of(k_block, i % 2, k_step);
        if constexpr (Operands::HAS_SCALE) {
            if (i < 2 && k_step * K_STEP % PARTIAL_K == 0)
                factor[i] = RowFactor::of(k_tile, i, sub_block_of(k_block, k_step * K_STEP / PARTIAL_K));
            a[i] = RowFactor::weights(factor[i % 2], k_tile, quad, i / 2);
        } else {
            a[i] = operand_pair(k_tile, quad, i / 2);
        }
    }
}

// acc += W · X over `k_block`, weights rounded to the type of X.
// `per_k_step` runs after every k-step, for other
// instructions to interleave.
template <class PerKStep>
QG_DEVICE void accumulate_rounded(Accumulators& acc, const KTile (&k_tiles)[ROW_TILES], u32 k_block, const XStage& x,
                                  const XCursor& cursor, PerKStep per_k_step) {
    [[maybe_unused]] RowFactor factor[ROW_TILES][2];
#pragma unroll
    for (u32 k_step = 0; k_step < K_STEPS; k_step++) {
        u32 a[ROW_TILES][4];
#pragma unroll
        for (u32 rt = 0; rt < ROW_TILES; rt++) rounded_weights(a[rt], factor[rt], k_tiles[rt], k_block, k_step);
        multiply_k_step(acc, a, x, cursor, k_step);
        per_k_step(k_step);
    }
}
