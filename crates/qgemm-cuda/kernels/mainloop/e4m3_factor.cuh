// Factors of `matmul` in E4M3, which f16 and f32 hold exactly.
#pragma once
#include "atoms/float.cuh"
#include "atoms/fp8.cuh"
#include "atoms/numeric.cuh"

// The format of such a factor, beside the element types of plain ones.
constexpr u32 FACTOR_E4M3 = 3;

QG_DEVICE float e4m3_to_f32_or_nan(u32 code) {
    return (code & 0x7fu) == 0x7fu ? bits_to_f32(0x7fffffffu) : e4m3_to_f32(code);
}

// Four codes as pairs of f16, NaN as NaN.
QG_DEVICE void e4m3x4_to_f16(u32& low, u32& high, u32 codes) {
#if QG_VARIANT >= 89
    low = cvt_f16x2_e4m3x2(codes & 0xffffu);
    high = cvt_f16x2_e4m3x2(codes >> 16);
#else
    const u32 upper[2] = {prmt(codes, 0, 0x1404), prmt(codes, 0, 0x3424)};
    u32 pair[2];
#pragma unroll
    for (u32 i = 0; i < 2; i++) {
        // With f16's exponent, 2^-8 of the number. NaN becomes 480, which times 140 is an infinity, where 448 is none.
        pair[i] = mul_f16x2(and_or(upper[i], 0x80008000u, (upper[i] >> 1) & 0x3f803f80u), 0x5c005c00u);
        pair[i] = fma_f16x2(mul_f16x2(pair[i], 0x58605860u), 0u, pair[i]);
    }
    low = pair[0], high = pair[1];
#endif
}
