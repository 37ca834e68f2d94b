// Dense operands of the epilogue, whose types are known at run time: one element, or a run of eight that begins at a
// multiple of eight elements of its row.
#pragma once
#include "atoms/float.cuh"
#include "atoms/memory.cuh"

constexpr u32 RUN = 8;

QG_DEVICE u32 dense_bytes(u32 dtype) {
    return dtype == DTYPE_F32 ? 4 : 2;
}
QG_DEVICE float half_to_f32(u32 dtype, u32 bits) {
    return dtype == DTYPE_F16 ? f16_to_f32(bits) : bf16_to_f32(bits);
}
QG_DEVICE u32 f32_to_half(u32 dtype, float value) {
    return dtype == DTYPE_F16 ? f32_to_f16(value) : f32_to_bf16(value);
}

QG_DEVICE float load_dense(u32 dtype, u64 base, u64 index) {
    const u8* array = reinterpret_cast<const u8*>(base);
    if (dtype == DTYPE_F32) return bits_to_f32(ld_global_u32(array + index * 4));
    return half_to_f32(dtype, ld_global_cached_u16(array + index * 2));
}

QG_DEVICE void store_dense(u32 dtype, u64 base, u64 index, float value) {
    u8* array = reinterpret_cast<u8*>(base);
    if (dtype == DTYPE_F32)
        st_global_u32(array + index * 4, f32_to_bits(value));
    else
        st_global_u16(array + index * 2, f32_to_half(dtype, value));
}

// The first `count` elements of a run; `wide` says that the run begins at a multiple of 16 bytes. The others are 0.
QG_DEVICE void load_dense_run(float (&v)[RUN], u32 dtype, u64 base, u64 index, bool wide, u32 count) {
    if (!wide || count < RUN) {
#pragma unroll
        for (u32 i = 0; i < RUN; i++) v[i] = i < count ? load_dense(dtype, base, index + i) : 0.0f;
        return;
    }
    const u8* address = reinterpret_cast<const u8*>(base) + index * dense_bytes(dtype);
    const u32x4 low = ld_global_v4(address);
    const u32 low_words[4] = {low.x, low.y, low.z, low.w};
    if (dtype == DTYPE_F32) {
        const u32x4 high = ld_global_v4(address + 16);
        const u32 high_words[4] = {high.x, high.y, high.z, high.w};
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            v[i] = bits_to_f32(low_words[i]);
            v[i + 4] = bits_to_f32(high_words[i]);
        }
    } else {
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            v[2 * i] = half_to_f32(dtype, low_words[i] & 0xffffu);
            v[2 * i + 1] = half_to_f32(dtype, low_words[i] >> 16);
        }
    }
}

QG_DEVICE void store_dense_run(u32 dtype, u64 base, u64 index, bool wide, u32 count, const float (&v)[RUN]) {
    if (!wide || count < RUN) {
#pragma unroll
        for (u32 i = 0; i < RUN; i++)
            if (i < count) store_dense(dtype, base, index + i, v[i]);
        return;
    }
    u8* address = reinterpret_cast<u8*>(base) + index * dense_bytes(dtype);
    if (dtype == DTYPE_F32) {
#pragma unroll
        for (u32 i = 0; i < RUN; i += 4)
            st_global_v4(address + i * 4, u32x4{f32_to_bits(v[i]), f32_to_bits(v[i + 1]), f32_to_bits(v[i + 2]),
                                                f32_to_bits(v[i + 3])});
    } else {
        u32 words[RUN / 2];
#pragma unroll
        for (u32 i = 0; i < RUN / 2; i++)
            words[i] = f32_to_half(dtype, v[2 * i]) | f32_to_half(dtype, v[2 * i + 1]) << 16;
        st_global_v4(address, u32x4{words[0], words[1], words[2], words[3]});
    }
}
