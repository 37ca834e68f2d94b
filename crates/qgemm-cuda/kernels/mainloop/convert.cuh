// Type and layout conversion: element loads,
// row factors, and rounding to the type of D.
#pragma once
#include "atoms/float.cuh"
#include "atoms/launch.cuh"
#include "atoms/memory.cuh"
#include "generated/abi.cuh"

// Kernel parameter.
struct ConvertParams {
    ConvertShape shape;
    ConvertPointers at;
};

constexpr u32 SOURCE_BYTES = QG_X_DTYPE == DTYPE_F32 ? 4 : 2;
constexpr u32 D_BYTES = QG_D_DTYPE == DTYPE_F32 ? 4 : 2;
// Whether rows are multiplied by powers of two. A constant, like
// QG_WHOLE_GROUPS, so that X prologues contain no unused code.
constexpr bool SCALED = QG_ROW_FACTORS;
static_assert(!SCALED || QG_D_DTYPE == DTYPE_F16, "f16 alone has too few exponents for its rows");
// Columns of D that a thread writes at once.
constexpr u32 GROUP = 8;

// An element of X from its bits.
QG_DEVICE float source_value(u32 bits) {
    if constexpr (QG_X_DTYPE == DTYPE_F32) return bits_to_f32(bits);
    return QG_X_DTYPE == DTYPE_F16 ? f16_to_f32(bits) : bf16_to_f32(bits);
}

QG_DEVICE u32 load_source(const u8* address) {
    if constexpr (QG_X_DTYPE == DTYPE_F32) return ld_global_u32(address);
    return ld_global_cached_u16(address);
}

// Column of X for column `column` of D; a
// value beyond X's columns stands for zero.
QG_DEVICE u32 source_column(const ConvertParams& p, u32 column) {
    if (!(p.shape.flags & QG_FLAG_K_ORDER)) return column;
    if (column >= p.shape.d_columns) return p.shape.columns;
    return ld_global_u32(reinterpret_cast<const u8*>(p.at.order) + (u64)column * 4);
}

constexpr u32 INFINITY_BITS = 0x7f800000u;

// Maximum of `largest` and
// value
// as f32 bits, which order like numbers. Infinities
// and NaN are ignored: no factor changes them, and
// finite values keep their factor.
QG_DEVICE u32 larger_magnitude(u32 largest, float value) {
    const u32 magnitude = f32_to_bits(value) & 0x7fffffffu;
    return magnitude > largest && magnitude < INFINITY_BITS ? magnitude : largest;
}

// Row factor (a power of two) and its inverse.
struct RowScale {
    float factor, inverse;

    // Scales the largest magnitude to [2^14, 2^15). Rounded up, it
    // stays below f16's 65504, and values down to 2^-28 of it stay
    // normal. Factor and inverse must be normal f32 numbers, so the
    // factor is at most 2^126; it maps f32's smallest number to 2^-23.
    QG_DEVICE RowScale of(u32 largest) {
        const u32 exponent = largest >> 23;
        const u32 biased = exponent > 15 ? 127 + 141 - exponent : 127 + 126;
        return {bits_to_f32(biased << 23), bits_to_f32((254 - biased) << 23)};
    }
};

// Bits of a value in the type of D.
QG_DEVICE u32 converted(float value) {
    if constexpr (QG_D_DTYPE == DTYPE_F32) return f32_to_bits(value);
    if constexpr (QG_D_DTYPE == DTYPE_F16) return f32_to_f16(value);
    const u32 bits = f32_to_bf16(value);
    // Values that round beyond bf16's range become its largest
    // finite number instead of infinity, which is as near.
    const bool overflows = (bits & 0x7fffu) == INFINITY_BITS >> 16 &&
                           (f32_to_bits(value) & 0x7fffffffu) < INFINITY_BITS;
    return overflows ? bits - 1 : bits;
}

QG_DEVICE void store_factor(const ConvertParams& p, u32 row, const RowScale& scale) {
    st_global_u32(reinterpret_cast<u8*>(p.at.row_factors) + (u64)row * 4, f32_to_bits(scale.inverse));
}

// GROUP adjacent elements of D.
struct ConvertedGroup {
    u32 word[GROUP * D_BYTES / 4];

    QG_DEVICE u32 element(const ConvertedGroup& group, u32 i) {
        if constexpr (D_BYTES == 4) return group.word[i % (GROUP * D_BYTES / 4)];
        return group.word[i / 2] >> (16 * (i % 2)) & 0xffffu;
    }

    // Stores columns [column, column +
    // GROUP) of a row, as far as D has them.
    QG_DEVICE void store(const ConvertedGroup& group, const ConvertParams& p, u32 row, u32 column) {
        u8* at = reinterpret_cast<u8*>(p.at.d) + (row * p.at.d_row + column) * D_BYTES;
        if constexpr (QG_WHOLE_GROUPS) {
#pragma unroll
            for (u32 i = 0; i < GROUP * D_BYTES / 4; i += 4)
                st_global_v4(at + i * 4,
                             u32x4{group.word[i], group.word[i + 1], group.word[i + 2], group.word[i + 3]});
            return;
        }
#pragma unroll
        for (u32 i = 0; i < GROUP; i++) {
            if (column + i >= p.shape.d_columns) continue;
            if constexpr (D_BYTES == 4)
                st_global_u32(at + i * 4, element(group, i));
            else
                st_global_u16(at + i * 2, element(group, i));
        }
    }
};
