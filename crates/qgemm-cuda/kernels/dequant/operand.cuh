// Codes as MMA operands (f16 or bf16 pairs) or
// FMA operands (f32).
// Codes of every quantized format are exact in each type.
// Scales act on the f32 accumulators.
#pragma once
#include QG_DEQUANT_FILE
#if QG_INTEGER_OPERANDS
#include "dequant/integer_operand.cuh"
#endif

// A template, so absent functions of a format are not compiled.
template <class D>
struct OperandsOf {
    using Format = D;

    QG_DEVICE u32 pair_f16(const KTile& kt, u32 quad, u32 pair) {
        return D::pair_f16(kt, quad, pair);
    }

#if QG_VARIANT >= 80
    // The scale, rounded to f16, in both halves of a word.
    // Formats with f16 scales provide it directly.
    QG_DEVICE u32 scale_f16x2(const KTile& kt, u32 row, u32 sub) { return stored_f16x2<D>(kt, row, sub, 0); }
    template <class F>
    QG_DEVICE auto stored_f16x2(const KTile& kt, u32 row, u32 sub, int) -> decltype(F::scale_f16x2(kt, row, sub)) {
        return F::scale_f16x2(kt, row, sub);
    }
    template <class F>
    QG_DEVICE u32 stored_f16x2(const KTile& kt, u32 row, u32 sub, long) {
        const float rounded = scale(kt, row, sub);
        return f32_to_f16x2(rounded, rounded);
    }

    QG_DEVICE u32 pair_bf16(const KTile& kt, u32 quad, u32 pair) {
        if constexpr (QG_PLAIN_DTYPE == DTYPE_BF16) {
            return D::pair_bf16(kt, quad, pair);
        } else {
            const u32 bits = D::pair_f16(kt, quad, pair);
            return f32_to_bf16x2(f16_to_f32(bits & 0xffffu), f16_to_f32(bits >> 16));
        }
    }
#endif

    QG_DEVICE void quad_f32(const KTile& kt, u32 quad, float (&w)[4]) {
        if constexpr (QG_PLAIN_DTYPE == DTYPE_F32 || QG_PLAIN_DTYPE == DTYPE_BF16) {
            D::quad_f32(kt, quad, w);
        } else {
#pragma unroll
            for (u32 pair = 0; pair < 2; pair++) {
                const u32 bits = D::pair_f16(kt, quad, pair);
                w[pair * 2] = f16_to_f32(bits & 0xffffu);
                w[pair * 2 + 1] = f16_to_f32(bits >> 16);
            }
        }
    }

    QG_DEVICE float scale(const KTile& kt, u32 row, u32 sub) {
        if constexpr (D::HAS_SCALE) return D::scale(kt, row, sub);
        return 1.0f;
    }
    QG_DEVICE float min(const KTile& kt, u32 row, u32 sub) {
        if constexpr (D::HAS_MIN) return D::min(kt, row, sub);
        return 0.0f;
    }

    static constexpr bool HAS_SCALE = D::HAS_SCALE;
    static constexpr bool HAS_MIN = D::HAS_MIN;
};
#if QG_INTEGER_OPERANDS
using Operands = OperandsOf<IntegerOperands<Dequant>>;
// Accumulator units per 1.0.
constexpr float FROM_UNITS = INTEGER_UNITS;
#else
using Operands = OperandsOf<Dequant>;
constexpr float FROM_UNITS = 1.0f;
#endif

// Columns of a partial accumulator, which has one scale:
// a sub-block, but at most a k-block.
constexpr u32 PARTIAL_K = !Operands::HAS_SCALE || QG_SUB_BLOCK > K_BLOCK ? K_BLOCK : QG_SUB_BLOCK;
constexpr u32 PARTIALS = K_BLOCK / PARTIAL_K;
constexpr u32 K_STEPS_PER_PARTIAL = K_STEPS / PARTIALS;

// Sub-block of the k-tile for partial `partial` of `k_block`.
QG_DEVICE constexpr u32 sub_block_of(u32 k_block, u32 partial) {
    return (k_block * K_BLOCK + partial * PARTIAL_K) / QG_SUB_BLOCK;
}
