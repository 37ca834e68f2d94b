// Dense operands of the epilogue, with runtime element types.
#pragma once
#include "atoms/float.cuh"
#include "atoms/memory.cuh"

// Elements of the longest run.
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

template <u32 WORDS>
QG_DEVICE void load_words(u32 (&words)[WORDS], const u8* address) {
    static_assert(WORDS == 1 || WORDS == 4, "an access");
    if constexpr (WORDS == 1) {
        words[0] = ld_global_u32(address);
    } else {
        const u32x4 v = ld_global_v4(address);
        words[0] = v.x, words[1] = v.y, words[2] = v.z, words[3] = v.w;
    }
}
template <u32 WORDS>
QG_DEVICE void store_words(u8* address, const u32 (&words)[WORDS]) {
    static_assert(WORDS == 1 || WORDS == 4, "an access");
    if constexpr (WORDS == 1)
        st_global_u32(address, words[0]);
    else
        st_global_v4(address, u32x4{words[0], words[1], words[2], words[3]});
}

// First `count` elements of a run of WIDTH, the others 0.
// WIDTH is two or eight; `index` is a multiple of WIDTH.
// `aligned`: rows start at multiples of 16 bytes.
template <u32 WIDTH>
QG_DEVICE void load_dense_run(float (&v)[WIDTH], u32 dtype, u64 base, u64 index, bool aligned, u32 count) {
    if (!aligned || count < WIDTH) {
#pragma unroll
        for (u32 i = 0; i < WIDTH; i++) v[i] = i < count ? load_dense(dtype, base, index + i) : 0.0f;
        return;
    }
    const u8* address = reinterpret_cast<const u8*>(base) + index * dense_bytes(dtype);
    u32 low[WIDTH / 2];
    load_words(low, address);
    if (dtype == DTYPE_F32) {
        u32 high[WIDTH / 2];
        load_words(high, address + WIDTH * 2);
#pragma unroll
        for (u32 i = 0; i < WIDTH / 2; i++) {
            v[i] = bits_to_f32(low[i]);
            v[i + WIDTH / 2] = bits_to_f32(high[i]);
        }
    } else {
#pragma unroll
        for (u32 i = 0; i < WIDTH / 2; i++) {
            v[2 * i] = half_to_f32(dtype, low[i] & 0xffffu);
            v[2 * i + 1] = half_to_f32(dtype, low[i] >> 16);
        }
    }
}

template <u32 WIDTH>
QG_DEVICE void store_dense_run(u32 dtype, u64 base, u64 index, bool aligned, u32 count, const float (&v)[WIDTH]) {
    if (!aligned || count < WIDTH) {
#pragma unroll
        for (u32 i = 0; i < WIDTH; i++)
            if (i < count) store_dense(dtype, base, index + i, v[i]);
        return;
    }
    u8* address = reinterpret_cast<u8*>(base) + index * dense_bytes(dtype);
    u32 words[WIDTH / 2];
    if (dtype == DTYPE_F32) {
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
#pragma unroll
            for (u32 i = 0; i < WIDTH / 2; i++) words[i] = f32_to_bits(v[half * (WIDTH / 2) + i]);
            store_words(address + half * WIDTH * 2, words);
        }
    } else {
#pragma unroll
        for (u32 i = 0; i < WIDTH / 2; i++)
            words[i] = f32_to_half(dtype, v[2 * i]) | f32_to_half(dtype, v[2 * i + 1]) << 16;
        store_words(address, words);
    }
}
