// Attention: stored numbers of Q, K and V, eight at a time.
#pragma once
#include "attention/problem.cuh"

// Eight adjacent stored numbers of a format, without scales.
template <u32 DTYPE>
struct Eight {
    static constexpr u32 BITS = DTYPE == DTYPE_F32 ? 32 : DTYPE < KV_E4M3 ? 16 : DTYPE == KV_Q4_0 ? 4 : 8;
    static constexpr u32 WORDS = BITS / 4;
    u32 words[WORDS];

    // Byte offset of an element.
    QG_DEVICE u64 offset_of(u64 element) {
        return element * BITS / 8;
    }

    QG_DEVICE Eight zeros() {
        Eight eight;
#pragma unroll
        for (u32 i = 0; i < WORDS; i++) eight.words[i] = 0;
        return eight;
    }

    // `aligned`: the address is a multiple of the size of
    // eight numbers, or of 16 bytes if this is smaller.
    QG_DEVICE Eight load(const u8* address, bool aligned) {
        Eight eight;
        if (aligned) {
            if constexpr (WORDS == 1) {
                eight.words[0] = ld_global_stream_u32(address);
            } else if constexpr (WORDS == 2) {
                const u32x2 v = ld_global_stream_v2(address);
                eight.words[0] = v.x, eight.words[1] = v.y;
            } else {
#pragma unroll
                for (u32 i = 0; i < WORDS; i += 4) {
                    const u32x4 v = ld_global_stream_v4(address + i * 4);
                    eight.words[i] = v.x, eight.words[i + 1] = v.y, eight.words[i + 2] = v.z, eight.words[i + 3] = v.w;
                }
            }
            return eight;
        }
#pragma unroll
        for (u32 i = 0; i < WORDS; i++) {
            if constexpr (BITS == 32) {
                eight.words[i] = ld_global_stream_u32(address + i * 4);
            } else if constexpr (BITS == 16) {
                eight.words[i] = ld_global_u16(address + i * 4) | ld_global_u16(address + i * 4 + 2) << 16;
            } else {
                eight.words[i] = 0;
#pragma unroll
                for (u32 j = 0; j < 4; j++) eight.words[i] |= ld_global_u8(address + i * 4 + j) << (8 * j);
            }
        }
        return eight;
    }

    QG_DEVICE float number(const Eight& eight, u32 i) {
        if constexpr (DTYPE == DTYPE_F32) return bits_to_f32(eight.words[i]);
        if constexpr (DTYPE == DTYPE_F16) return f16_to_f32(eight.words[i / 2] >> (i % 2 * 16));
        if constexpr (DTYPE == DTYPE_BF16) {
            const u32 word = eight.words[i / 2];
            return bits_to_f32(i % 2 ? word & 0xffff0000u : word << 16);
        }
        // Shift the byte to the top, then
        // arithmetically back: sign extension.
        if constexpr (DTYPE == KV_Q8_0) return (float)((i32)(eight.words[i / 4] << (24 - i % 4 * 8)) >> 24);
        if constexpr (DTYPE == KV_Q4_0) return (float)(i32)(eight.words[0] >> (i * 4) & 15u) - 8.0f;
        if constexpr (DTYPE == KV_E4M3) return e4m3_to_f32_or_nan(eight.words[i / 4] >> (i % 4 * 8) & 0xffu);
    }
};

// Loads eight numbers as f32.
// Their type is a run-time value.
QG_DEVICE void load_eight(u64 address, u32 dtype, u64 element, bool aligned, float (&q)[8]) {
    const u8* base = reinterpret_cast<const u8*>(address);
    if (dtype == DTYPE_F32) {
        const auto eight = Eight<DTYPE_F32>::load(base + element * 4, aligned);
#pragma unroll
        for (u32 i = 0; i < 8; i++) q[i] = Eight<DTYPE_F32>::number(eight, i);
    } else if (dtype == DTYPE_F16) {
        const auto eight = Eight<DTYPE_F16>::load(base + element * 2, aligned);
#pragma unroll
        for (u32 i = 0; i < 8; i++) q[i] = Eight<DTYPE_F16>::number(eight, i);
    } else {
        const auto eight = Eight<DTYPE_BF16>::load(base + element * 2, aligned);
#pragma unroll
        for (u32 i = 0; i < 8; i++) q[i] = Eight<DTYPE_BF16>::number(eight, i);
    }
}

// Loads eight numbers of Q as f32.
QG_DEVICE void load_query(const AttentionParams& p, u64 element, float (&q)[8]) {
    load_eight(p.at.q, p.shape.dtype, element, p.shape.flags & QG_FLAG_Q_ALIGNED, q);
}
