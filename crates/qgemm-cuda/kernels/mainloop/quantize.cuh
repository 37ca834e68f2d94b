// Quantization of X: parameter, and loads of column groups.
#pragma once
#include "mainloop/quantize_codes.cuh"

// Kernel parameter.
struct QuantizeParams {
    QuantizeShape shape;
    QuantizePointers at;
};

constexpr u32 SOURCE_BYTES = QG_X_DTYPE == DTYPE_F32 ? 4 : 2;
constexpr u32 SOURCE_WORDS = GROUP * SOURCE_BYTES / 4;

// Eight adjacent stored elements of X.
struct SourceGroup {
    u32 word[SOURCE_WORDS];

    QG_DEVICE float value(const SourceGroup& group, u32 i) {
        if constexpr (SOURCE_BYTES == 4) return bits_to_f32(group.word[i % SOURCE_WORDS]);
        const u32 bits = group.word[i / 2] >> (16 * (i % 2)) & 0xffffu;
        return QG_X_DTYPE == DTYPE_F16 ? f16_to_f32(bits) : bf16_to_f32(bits);
    }

    // Loads columns [column, column + GROUP) of
    // a row; columns beyond the last are zeros.
    QG_DEVICE SourceGroup load(const QuantizeParams& p, const u8* row, u32 column) {
        SourceGroup group = {};
        if ((p.shape.flags & QG_FLAG_X_ALIGNED16) && column + GROUP <= p.shape.columns) {
#pragma unroll
            for (u32 i = 0; i < SOURCE_WORDS; i += 4) {
                const u32x4 v = ld_global_v4(row + (u64)column * SOURCE_BYTES + i * 4);
                group.word[i] = v.x, group.word[i + 1] = v.y, group.word[i + 2] = v.z, group.word[i + 3] = v.w;
            }
            return group;
        }
#pragma unroll
        for (u32 i = 0; i < GROUP; i++) {
            if (column + i >= p.shape.columns) continue;
            const u8* at = row + (u64)(column + i) * p.at.x_col * SOURCE_BYTES;
            if constexpr (SOURCE_BYTES == 4)
                group.word[i % SOURCE_WORDS] = ld_global_u32(at);
            else
                group.word[i / 2] |= ld_global_cached_u16(at) << (16 * (i % 2));
        }
        return group;
    }
};
