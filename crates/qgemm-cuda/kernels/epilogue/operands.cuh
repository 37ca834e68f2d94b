// Dense operands of the epilogue, whose types are known at run time: one element, or a run of a few.
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

// WORDS words from a multiple of their bytes, or of 16.
template <u32 WORDS>
QG_DEVICE void load_words(u32 (&words)[WORDS], const u8* address) {
    if constexpr (WORDS == 1) {
        words[0] = ld_global_u32(address);
    } else if constexpr (WORDS == 2) {
        const u32x2 v = ld_global_v2(address);
        words[0] = v.x, words[1] = v.y;
    } else {
#pragma unroll
        for (u32 i = 0; i < WORDS; i += 4) {
            const u32x4 v = ld_global_v4(address + i * 4);
            words[i] = v.x, words[i + 1] = v.y, words[i + 2] = v.z, words[i + 3] = v.w;
        }
    }
}
template <u32 WORDS>
QG_DEVICE void store_words(u8* address, const u32 (&words)[WORDS]) {
    if constexpr (WORDS == 1) {
        st_global_u32(address, words[0]);
    } else if constexpr (WORDS == 2) {
        st_global_v2(address, u32x2{words[0], words[1]});
    } else {
#pragma unroll
        for (u32 i = 0; i < WORDS; i += 4)
            st_global_v4(address + i * 4, u32x4{words[i], words[i + 1], words[i + 2], words[i + 3]});
    }
}

// The first `count` elements of a run of 2, 4 or 8 that begins at a multiple of as many; `wide` says that its row begins at a
// multiple of 16 bytes. The others are 0.
template <u32 WIDTH>
QG_DEVICE void load_dense_run(float (&v)[WIDTH], u32 dtype, u64 base, u64 index, bool wide, u32 count) {
    if (!wide || count < WIDTH) {
#pragma unroll
        for (u32 i = 0; i < WIDTH; i++) v[i] = i < count ? load_dense(dtype, base, index + i) : 0.0f;
        return;
    }
    const u8* address = reinterpret_cast<const u8*>(base) + index * dense_bytes(dtype);
    if (dtype == DTYPE_F32) {
        u32 words[WIDTH];
        load_words(words, address);
#pragma unroll
        for (u32 i = 0; i < WIDTH; i++) v[i] = bits_to_f32(words[i]);
    } else {
        u32 words[WIDTH / 2];
        load_words(words, address);
#pragma unroll
        for (u32 i = 0; i < WIDTH / 2; i++) {
            v[2 * i] = half_to_f32(dtype, words[i] & 0xffffu);
            v[2 * i + 1] = half_to_f32(dtype, words[i] >> 16);
        }
    }
}

template <u32 WIDTH>
QG_DEVICE void store_dense_run(u32 dtype, u64 base, u64 index, bool wide, u32 count, const float (&v)[WIDTH]) {
    if (!wide || count < WIDTH) {
#pragma unroll
        for (u32 i = 0; i < WIDTH; i++)
            if (i < count) store_dense(dtype, base, index + i, v[i]);
        return;
    }
    u8* address = reinterpret_cast<u8*>(base) + index * dense_bytes(dtype);
    if (dtype == DTYPE_F32) {
        u32 words[WIDTH];
#pragma unroll
        for (u32 i = 0; i < WIDTH; i++) words[i] = f32_to_bits(v[i]);
        store_words(address, words);
    } else {
        u32 words[WIDTH / 2];
#pragma unroll
        for (u32 i = 0; i < WIDTH / 2; i++)
            words[i] = f32_to_half(dtype, v[2 * i]) | f32_to_half(dtype, v[2 * i + 1]) << 16;
        store_words(address, words);
    }
}
