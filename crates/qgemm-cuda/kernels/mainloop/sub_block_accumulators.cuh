// Sums over a sub-block (no more than a slab) on matrix instructions, and what the sub-block's scale and minimum make of
// them: acc += scale * (codes · X) + min * Σx, all in units of the operands (`FROM_UNITS`).
#pragma once
#include "atoms/warp.cuh"
#include "mainloop/mma_operand.cuh"

// A span is the chunks whose operands are at hand together: those of a sub-block, at least one.
constexpr u32 SPAN_K = !Operands::HAS_SCALE || QG_SUB_BLOCK < K_BLOCK ? K_BLOCK
                       : QG_SUB_BLOCK < QG_K_TILE                     ? QG_SUB_BLOCK
                                                                      : QG_K_TILE;
constexpr u32 SPANS = QG_K_TILE / SPAN_K, SPAN_K_BLOCKS = SPAN_K / K_BLOCK, SPAN_K_STEPS = SPAN_K_BLOCKS * K_STEPS;
constexpr u32 PARTIAL_K_STEPS = Operands::HAS_SCALE && QG_SUB_BLOCK < SPAN_K ? QG_SUB_BLOCK / K_STEP : SPAN_K_STEPS;
constexpr u32 SPAN_SUMS = SPAN_K_STEPS / PARTIAL_K_STEPS;

// The operand of step `k_step` of span `span`: rows g and g + 8 of the tile.
QG_DEVICE void load_operand(u32 (&a)[4], const KTile& k_tile, u32 span, u32 k_step) {
#pragma unroll
    for (u32 i = 0; i < 4; i++)
        a[i] = operand_pair(k_tile, quad_of(span * SPAN_K_BLOCKS + k_step / K_STEPS, i % 2, k_step % K_STEPS), i / 2);
}

#if QG_INTEGER_OPERANDS
// Sums of raw codes are kept apart by their lift.
constexpr u32 PARTS = 2;
QG_DEVICE constexpr u32 part_of(u32 k_step) { return raw_lift(k_step % K_STEPS) / LIFT; }
QG_DEVICE constexpr float part_factor(u32 part) { return part == 0 ? 1.0f : LIFTED; }
constexpr bool NESTED_OFFSETS = Operands::Format::NESTED_OFFSETS;
constexpr float CODE_BIAS = RAW_BIAS;
// Codes' common offset times Σx is what the sums begin with.
constexpr bool SUMS_BEGIN_WITH_X = !Operands::HAS_MIN && !NESTED_OFFSETS;
QG_DEVICE constexpr u32 constant_pair(u32 first_k_step) {
    return Operands::Format::constant_pair(raw_lift(first_k_step % K_STEPS));
}
#else
constexpr u32 PARTS = 1;
QG_DEVICE constexpr u32 part_of(u32) { return 0; }
QG_DEVICE constexpr float part_factor(u32) { return 1.0f; }
constexpr float CODE_BIAS = 0;
constexpr bool NESTED_OFFSETS = false, SUMS_BEGIN_WITH_X = false;
QG_DEVICE constexpr u32 constant_pair(u32) { return ONE_PAIR; }
#endif

constexpr bool TAKES_SUMS_OF_X = Operands::HAS_MIN || SUMS_BEGIN_WITH_X;

// Operands of constants, one for each part. The compiler must not see that they are constants: it would make their four registers
// anew for every instruction.
struct Constants {
    u32 a[PARTS][4];

    QG_DEVICE Constants make(u32 lane) {
        Constants c = {};
        if constexpr (!TAKES_SUMS_OF_X) return c;
#pragma unroll
        for (u32 k_step = 0; k_step < K_STEPS; k_step++)
#pragma unroll
            for (u32 i = 0; i < 4; i++) c.a[part_of(k_step)][i] = constant_pair(k_step);
#pragma unroll
        for (u32 part = 0; part < PARTS; part++)
#pragma unroll
            for (u32 i = 0; i < 4; i++) c.a[part][i] ^= shfl_idx_u32(lane, part * 4 + i) ^ (part * 4 + i);
        return c;
    }
};

// Each token's Σx over the columns of a sum, times a constant, as the D registers of one instruction (all rows alike).
struct SumOfX {
    float value[4];

    // `b` are the B operands of the span's steps.
    QG_DEVICE SumOfX of(const Constants& constants, const u32 (&b)[SPAN_K_STEPS][2], u32 sum) {
        SumOfX x = {};
        if constexpr (!TAKES_SUMS_OF_X) return x;
#pragma unroll
        for (u32 i = 0; i < PARTIAL_K_STEPS; i++)
            mma_k_step(x.value, constants.a[part_of(sum * PARTIAL_K_STEPS)], b[sum * PARTIAL_K_STEPS + i]);
        return x;
    }
};

// Scale and minimum of a lane's two rows.
struct SumFactors {
    float scale[2][PARTS], min[2];

    QG_DEVICE SumFactors of(const KTile& k_tile, u32 span, u32 sum) {
        const u32 sub = (span * SPAN_K + sum * PARTIAL_K_STEPS * K_STEP) / QG_SUB_BLOCK;
        SumFactors f;
#pragma unroll
        for (u32 row = 0; row < 2; row++) {
            const float scale = Operands::scale(k_tile, row, sub);
#pragma unroll
            for (u32 part = 0; part < PARTS; part++) f.scale[row][part] = scale * part_factor(part);
            f.min[row] = Operands::min(k_tile, row, sub);
        }
        return f;
    }

    // Of a sum of which all codes are lifted alike, where `scale` makes up for that.
    QG_DEVICE SumFactors of_scales(const float (&scale)[2]) {
        SumFactors f = {};
#pragma unroll
        for (u32 row = 0; row < 2; row++)
#pragma unroll
            for (u32 part = 0; part < PARTS; part++) f.scale[row][part] = scale[row];
        return f;
    }
};

// The sums of 16 rows and eight tokens under way.
struct SubBlockSum {
    float part[PARTS][4];

    QG_DEVICE SubBlockSum begin(const SumOfX& x, u32 sum) {
        SubBlockSum s = {};
        if constexpr (SUMS_BEGIN_WITH_X) {
#pragma unroll
            for (u32 i = 0; i < 4; i++) s.part[part_of(sum * PARTIAL_K_STEPS)][i] = x.value[i];
        }
        return s;
    }
    QG_DEVICE void multiply(SubBlockSum& s, const u32 (&a)[4], const u32 (&b)[2], u32 k_step) {
        mma_k_step(s.part[part_of(k_step)], a, b);
    }
    QG_DEVICE void add_to(float (&acc)[4], const SubBlockSum& s, const SumFactors& f, const SumOfX& x, u32 sum) {
#pragma unroll
        for (u32 part = 0; part < PARTS; part++) {
            bool used = false;
#pragma unroll
            for (u32 i = 0; i < PARTIAL_K_STEPS; i++) used |= part_of(sum * PARTIAL_K_STEPS + i) == part;
            if (!used) continue;
#pragma unroll
            for (u32 i = 0; i < 4; i++) acc[i] += f.scale[i / 2][part] * s.part[part][i];
        }
        if constexpr (Operands::HAS_MIN) {
#pragma unroll
            for (u32 i = 0; i < 4; i++) acc[i] += f.min[i / 2] * x.value[i];
        }
    }
};
