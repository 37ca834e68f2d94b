// MMA accumulators of a sub-block (at most a k-tile).
// Scale and minimum are applied in operand units (`FROM_UNITS`):
// acc += scale * (codes · X) + min * Σx.
#pragma once
#include "atoms/warp.cuh"
#include "mainloop/mma_operand.cuh"

// A span is the k-blocks whose operands are in
// registers together:
// those of a sub-block, at least one.
constexpr u32 SPAN_K = !Operands::HAS_SCALE || QG_SUB_BLOCK < K_BLOCK ? K_BLOCK
                       : QG_SUB_BLOCK < QG_K_TILE                     ? QG_SUB_BLOCK
                                                                      : QG_K_TILE;
constexpr u32 SPANS = QG_K_TILE / SPAN_K, SPAN_K_BLOCKS = SPAN_K / K_BLOCK, SPAN_K_STEPS = SPAN_K_BLOCKS * K_STEPS;
constexpr u32 PARTIAL_K_STEPS = Operands::HAS_SCALE && QG_SUB_BLOCK < SPAN_K ? QG_SUB_BLOCK / K_STEP : SPAN_K_STEPS;
constexpr u32 SPAN_PARTIALS = SPAN_K_STEPS / PARTIAL_K_STEPS;

// Operand of k-step `k_step` of span `span`: rows g and g + 8.
QG_DEVICE void load_operand(u32 (&a)[4], const KTile& k_tile, u32 span, u32 k_step) {
#pragma unroll
    for (u32 i = 0; i < 4; i++)
        a[i] = operand_pair(k_tile, quad_of(span * SPAN_K_BLOCKS + k_step / K_STEPS, i % 2, k_step % K_STEPS), i / 2);
}

#if QG_INTEGER_OPERANDS
// Each lift of integer operands has separate accumulators.
constexpr u32 LIFT_LEVELS = 2;
QG_DEVICE constexpr u32 lift_level(u32 k_step) { return integer_lift(k_step % K_STEPS) / LIFT; }
QG_DEVICE constexpr float level_factor(u32 level) { return level == 0 ? 1.0f : LIFT_FACTOR; }
constexpr bool SUPER_BLOCK_MINIMUMS = Operands::Format::SUPER_BLOCK_MINIMUMS;
constexpr float CODE_BIAS = INTEGER_BIAS;
// Accumulators start at the X block sum times the common offset.
constexpr bool STARTS_AT_X_BLOCK_SUM = !Operands::HAS_MIN && !SUPER_BLOCK_MINIMUMS;
QG_DEVICE constexpr u32 constant_pair(u32 first_k_step) {
    return Operands::Format::constant_pair(integer_lift(first_k_step % K_STEPS));
}
#else
constexpr u32 LIFT_LEVELS = 1;
QG_DEVICE constexpr u32 lift_level(u32) { return 0; }
QG_DEVICE constexpr float level_factor(u32) { return 1.0f; }
constexpr float CODE_BIAS = 0;
constexpr bool SUPER_BLOCK_MINIMUMS = false, STARTS_AT_X_BLOCK_SUM = false;
QG_DEVICE constexpr u32 constant_pair(u32) { return ONE_PAIR; }
#endif

constexpr bool NEEDS_X_BLOCK_SUMS = Operands::HAS_MIN || STARTS_AT_X_BLOCK_SUM;

// Constant operands, one per lift.
// They are opaque to the compiler, which would otherwise
// rematerialize four registers for every MMA.
struct Constants {
    u32 a[LIFT_LEVELS][4];

    QG_DEVICE Constants make(u32 lane) {
        Constants c = {};
        if constexpr (!NEEDS_X_BLOCK_SUMS) return c;
#pragma unroll
        for (u32 k_step = 0; k_step < K_STEPS; k_step++)
#pragma unroll
            for (u32 i = 0; i < 4; i++) c.a[lift_level(k_step)][i] = constant_pair(k_step);
#pragma unroll
        for (u32 level = 0; level < LIFT_LEVELS; level++)
#pragma unroll
            for (u32 i = 0; i < 4; i++) c.a[level][i] ^= shfl_idx_u32(lane, level * 4 + i) ^ (level * 4 + i);
        return c;
    }
};

// X block sum of each token over a partial, times a constant,
// as D registers; all rows are equal.
struct XBlockSum {
    float value[4];

    // `b`: B operands of the span's k-steps.
    QG_DEVICE XBlockSum of(const Constants& constants, const u32 (&b)[SPAN_K_STEPS][2], u32 partial) {
        XBlockSum x = {};
        if constexpr (!NEEDS_X_BLOCK_SUMS) return x;
#pragma unroll
        for (u32 i = 0; i < PARTIAL_K_STEPS; i++)
            mma_k_step(x.value, constants.a[lift_level(partial * PARTIAL_K_STEPS)], b[partial * PARTIAL_K_STEPS + i]);
        return x;
    }
};

// Scales and minimums of a lane's two rows.
struct SubBlockFactors {
    float scale[2][LIFT_LEVELS], min[2];

    QG_DEVICE SubBlockFactors of(const KTile& k_tile, u32 span, u32 partial) {
        const u32 sub = (span * SPAN_K + partial * PARTIAL_K_STEPS * K_STEP) / QG_SUB_BLOCK;
        SubBlockFactors f;
#pragma unroll
        for (u32 row = 0; row < 2; row++) {
            const float scale = Operands::scale(k_tile, row, sub);
#pragma unroll
            for (u32 level = 0; level < LIFT_LEVELS; level++) f.scale[row][level] = scale * level_factor(level);
            f.min[row] = Operands::min(k_tile, row, sub);
        }
        return f;
    }

    // For a partial of uniform lift, which `scale` includes.
    QG_DEVICE SubBlockFactors of_scales(const float (&scale)[2]) {
        SubBlockFactors f = {};
#pragma unroll
        for (u32 row = 0; row < 2; row++)
#pragma unroll
            for (u32 level = 0; level < LIFT_LEVELS; level++) f.scale[row][level] = scale[row];
        return f;
    }
};

// Partial accumulators of 16 rows and eight tokens.
struct SubBlockAccumulators {
    float value[LIFT_LEVELS][4];

    QG_DEVICE SubBlockAccumulators begin(const XBlockSum& x, u32 partial) {
        SubBlockAccumulators s = {};
        if constexpr (STARTS_AT_X_BLOCK_SUM) {
#pragma unroll
            for (u32 i = 0; i < 4; i++) s.value[lift_level(partial * PARTIAL_K_STEPS)][i] = x.value[i];
        }
        return s;
    }
    QG_DEVICE void multiply(SubBlockAccumulators& s, const u32 (&a)[4], const u32 (&b)[2], u32 k_step) {
        mma_k_step(s.value[lift_level(k_step)], a, b);
    }
    QG_DEVICE void add_to(float (&acc)[4], const SubBlockAccumulators& s, const SubBlockFactors& f, const XBlockSum& x,
                          u32 partial) {
#pragma unroll
        for (u32 level = 0; level < LIFT_LEVELS; level++) {
            bool used = false;
#pragma unroll
            for (u32 i = 0; i < PARTIAL_K_STEPS; i++) used |= lift_level(partial * PARTIAL_K_STEPS + i) == level;
            if (!used) continue;
#pragma unroll
            for (u32 i = 0; i < 4; i++) acc[i] += f.scale[i / 2][level] * s.value[level][i];
        }
        if constexpr (Operands::HAS_MIN) {
#pragma unroll
            for (u32 i = 0; i < 4; i++) acc[i] += f.min[i / 2] * x.value[i];
        }
    }
};
