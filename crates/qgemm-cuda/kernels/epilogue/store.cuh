// D = alpha · row_scale · sum + beta · C + bias, converted once.
#pragma once
#include "atoms/float.cuh"
#include "atoms/memory.cuh"
#include "mainloop/params.cuh"

QG_DEVICE float load_dense(u32 dtype, u64 base, u64 index) {
    const u8* array = reinterpret_cast<const u8*>(base);
    if (dtype == DTYPE_F32) return bits_to_f32(ld_global_u32(array + index * 4));
    const u32 bits = ld_global_cached_u16(array + index * 2);
    return dtype == DTYPE_F16 ? f16_to_f32(bits) : bf16_to_f32(bits);
}

QG_DEVICE void store_output(const GemmParams& p, u32 token, u32 feature, float sum) {
    if (token >= p.shape.m || feature >= p.shape.n) return;
    const u32 flags = p.shape.flags;
    float v = p.shape.alpha * sum;
    if (flags & QG_FLAG_ROW_SCALE) v *= load_dense(DTYPE_F32, p.at.row_scale, feature);
    if (flags & QG_FLAG_C) v += p.shape.beta * load_dense(p.shape.c_dtype, p.at.c, token * p.at.c_row + feature);
    if (flags & QG_FLAG_BIAS) v += load_dense(p.shape.bias_dtype, p.at.bias, feature);
    u8* d = reinterpret_cast<u8*>(p.at.d);
    const u64 index = token * p.at.d_row + feature;
    if (p.shape.d_dtype == DTYPE_F32) {
        st_global_u32(d + index * 4, f32_to_bits(v));
    } else {
        st_global_u16(d + index * 2, p.shape.d_dtype == DTYPE_F16 ? f32_to_f16(v) : f32_to_bf16(v));
    }
}
