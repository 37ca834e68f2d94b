// What both kernels that convert X share: reading an element, the power of two of a token, and rounding to the type of
// the result.
#pragma once
#include "atoms/float.cuh"
#include "atoms/launch.cuh"
#include "atoms/memory.cuh"
#include "generated/abi.cuh"

constexpr u32 SOURCE_BYTES = QG_X_DTYPE == DTYPE_F32 ? 4 : 2;
// Whether tokens are multiplied by powers of two. Only f16 needs that: it has too few exponents for f32 and bf16.
constexpr bool SCALED = QG_CONVERTED_DTYPE == DTYPE_F16 && QG_X_DTYPE != DTYPE_F16;
// Columns of the result that a thread writes at once: 16 bytes.
constexpr u32 GROUP = 8;

// The value of an element of X with these bits.
QG_DEVICE float source_value(u32 bits) {
    if constexpr (QG_X_DTYPE == DTYPE_F32) return bits_to_f32(bits);
    return QG_X_DTYPE == DTYPE_F16 ? f16_to_f32(bits) : bf16_to_f32(bits);
}

QG_DEVICE u32 load_source(const u8* address) {
    if constexpr (QG_X_DTYPE == DTYPE_F32) return ld_global_u32(address);
    return ld_global_cached_u16(address);
}

// The input feature of column `column` of the result. Features from k on stand for zero.
QG_DEVICE u32 source_column(const StageX& p, u32 column) {
    if (!(p.flags & QG_FLAG_K_ORDER)) return column;
    return ld_global_u32(reinterpret_cast<const u8*>(p.k_order) + (u64)column * 4);
}

constexpr u32 INFINITY_BITS = 0x7f800000u;

// The larger of `largest` and |value|, both as the bits of f32, which order like the numbers. Infinities and NaN do not
// count: no factor changes them, and the token's finite values keep their precision.
QG_DEVICE u32 larger_magnitude(u32 largest, float value) {
    const u32 magnitude = f32_to_bits(value) & 0x7fffffffu;
    return magnitude > largest && magnitude < INFINITY_BITS ? magnitude : largest;
}

// A power of two and its inverse.
struct TokenScale {
    float factor, inverse;

    // Brings the largest magnitude of a token to [2^14, 2^15): rounded up, it stays below f16's 65504, and values down
    // to 2^-28 of it remain normal numbers. Factor and inverse are both normal in f32, so 2^126 is the largest factor;
    // it makes f32's smallest number 2^-23.
    QG_DEVICE TokenScale of(u32 largest) {
        const u32 exponent = largest >> 23;
        const u32 biased = exponent > 15 ? 127 + 141 - exponent : 127 + 126;
        return {bits_to_f32(biased << 23), bits_to_f32((254 - biased) << 23)};
    }
};

// A value in the type of the result.
QG_DEVICE u32 converted(float value) {
    if constexpr (QG_CONVERTED_DTYPE == DTYPE_F16) return f32_to_f16(value);
    const u32 bits = f32_to_bf16(value);
    // f32's largest numbers would round to infinity. The largest finite number of bf16 is as near.
    const bool overflows = (bits & 0x7fffu) == INFINITY_BITS >> 16 &&
                           (f32_to_bits(value) & 0x7fffffffu) < INFINITY_BITS;
    return overflows ? bits - 1 : bits;
}

QG_DEVICE void store_factor(const StageX& p, u32 token, const TokenScale& scale) {
    st_global_u32(reinterpret_cast<u8*>(p.factors) + (u64)token * 4, f32_to_bits(scale.inverse));
}

// The address of columns [column, column + GROUP) of a token's result.
QG_DEVICE u8* converted_group(const StageX& p, u32 token, u32 column) {
    return reinterpret_cast<u8*>(p.staged) + ((u64)token * p.columns + column) * 2;
}
