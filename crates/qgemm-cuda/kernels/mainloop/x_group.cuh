// Eight consecutive columns of a token of X.
// Any strides, alignment and ragged ends; act-order too.
#pragma once
#include "dequant/k_tile.cuh"
#include "mainloop/column_group.cuh"
#include "sched/rows.cuh"

#if QG_USE_MMA
using XElement = u16;
#else
using XElement = float;
#endif

// Register words of a column group.
constexpr u32 GROUP_WORDS = GROUP * sizeof(XElement) / 4;
struct XGroup {
    u32 word[GROUP_WORDS];
};

constexpr u32 X_BYTES = QG_X_DTYPE == DTYPE_F32 ? 4 : 2;

// The element's bits: unchanged for MMA, else as f32.
QG_DEVICE u32 load_x_element(const u8* address) {
    if constexpr (QG_X_DTYPE == DTYPE_F32) return ld_global_u32(address);
    const u32 bits = ld_global_cached_u16(address);
    if constexpr (QG_USE_MMA) return bits;
    return f32_to_bits(QG_X_DTYPE == DTYPE_F16 ? f16_to_f32(bits) : bf16_to_f32(bits));
}

// Eight columns of a token from `column` on, zero outside X.
// `column` is a multiple of 8, in stored order.
QG_DEVICE XGroup load_x_group(const GemmParams& p, u32 token, u32 column) {
    XGroup x = {};
    u32 own;
    if (!find_x_row(p, token, own)) return x;
    const u8* row = reinterpret_cast<const u8*>(p.at.x) + own * p.at.x_row * X_BYTES;
    if ((p.shape.flags & QG_FLAG_X_ALIGNED16) && !(p.shape.flags & QG_FLAG_K_ORDER) && column + GROUP <= p.shape.k) {
        const u8* address = row + (u64)column * X_BYTES;
#pragma unroll
        for (u32 i = 0; i < GROUP * X_BYTES / 16; i++) {
            const u32x4 v = ld_global_v4(address + i * 16);
            const u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
            for (u32 j = 0; j < 4; j++) {
                if constexpr (QG_USE_MMA || QG_X_DTYPE == DTYPE_F32) {
                    x.word[i * 4 + j] = words[j];
                } else {
#pragma unroll
                    for (u32 half = 0; half < 2; half++) {
                        const u32 bits = half == 0 ? words[j] & 0xffffu : words[j] >> 16;
                        x.word[(j * 2 + half) % GROUP_WORDS] =
                            f32_to_bits(QG_X_DTYPE == DTYPE_F16 ? f16_to_f32(bits) : bf16_to_f32(bits));
                    }
                }
            }
        }
        return x;
    }
    // Elements are shifted in one by one:
    // a rolled loop can still keep the group in registers.
#pragma unroll 1
    for (u32 i = 0; i < GROUP; i++) {
        u32 source = column + i;
        if (p.shape.flags & QG_FLAG_K_ORDER) {
            // The table has `stored_k` entries.
            // 0xffffffff marks columns without an input feature.
            source = source < p.shape.stored_k
                         ? ld_global_u32(reinterpret_cast<const u8*>(p.at.k_order) + (u64)source * 4)
                         : 0xffffffffu;
        }
        const u32 value = source < p.shape.k ? load_x_element(row + (u64)source * p.at.x_col * X_BYTES) : 0;
        constexpr u32 WORD_BITS = sizeof(XElement) * 8;
#pragma unroll
        for (u32 w = 0; w < GROUP_WORDS; w++) {
            const u32 above = w + 1 < GROUP_WORDS ? x.word[w + 1] : value;
            x.word[w] = WORD_BITS == 32 ? above : (x.word[w] >> 16) | (above << 16);
        }
    }
    return x;
}
