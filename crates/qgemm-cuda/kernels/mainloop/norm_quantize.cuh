// Quantization of a normalized row.
#pragma once
#include "mainloop/norm.cuh"
#include "mainloop/quantize_codes.cuh"

// Kernel parameter. D has the columns of the codes.
struct NormQuantizeParams {
    NormParams norm;
    QuantizePointers to;
};

// Whether the row maximum must be known before
// any code is stored (per-token scale or factor).
constexpr bool OF_TOKEN = QG_SCALE_OF_TOKEN || QG_FACTOR == FACTOR_PER_TOKEN;

// Eight adjacent normalized columns.
struct NormalizedGroup {
    float number[GROUP];

    QG_DEVICE float value(const NormalizedGroup& group, u32 i) {
        return group.number[i];
    }

    QG_DEVICE u32 largest(const NormalizedGroup& group) {
        if constexpr (!OF_TOKEN) return 0;
        return QG_FACTOR == FACTOR_PER_TOKEN ? largest_finite_of(group) : largest_of(group);
    }
};

// Per-row quantization parameters.
struct RowScale {
    float inverse_factor;
    BlockScale of_token;

    // Computes and stores the per-row parameters. `largest` is the maximum
    // over the thread's columns; all threads of the row take part.
    QG_DEVICE RowScale of(const NormQuantizeParams& p, u32 row, bool is_first, u32 largest, NormStorage& storage) {
        RowScale scale = {given_inverse(p.to), {}};
        if constexpr (OF_TOKEN) largest = row_max(p.norm.shape.row_threads, largest, storage.largest);
        if constexpr (QG_FACTOR == FACTOR_PER_TOKEN) {
            const float factor = f32_scale(largest, MOST_NVFP4);
            if (is_first) st_global_u32(reinterpret_cast<u8*>(p.to.token_factors) + (u64)row * 4, f32_to_bits(factor));
            scale.inverse_factor = rcp_rn_f32(factor);
        } else if constexpr (QG_SCALE_OF_TOKEN) {
            scale.of_token = BlockScale::of_block(largest, 1.0f);
            if (is_first)
                st_global_u32(reinterpret_cast<u8*>(p.to.scales) + row * p.to.scales_row, scale.of_token.stored);
        } else if constexpr (QG_SCALE == SCALE_NONE) {
            scale.of_token = {scale.inverse_factor, 0.0f, 0, true};
        }
        return scale;
    }
};

// Quantizes and stores a group. Warp-collective,
// including lanes beyond the row.
QG_DEVICE void store_quantized(const NormQuantizeParams& p, const RowScale& scale, const NormalizedGroup& group, u64 row,
                               u32 column) {
    const bool stores = column < p.norm.shape.d_columns;
    if constexpr (QG_SCALE_OF_TOKEN || QG_SCALE == SCALE_NONE) {
        u8* codes = reinterpret_cast<u8*>(p.to.codes) + row * p.to.codes_row;
        if (stores) store_codes(codes, column, codes_of(group, scale.of_token));
    } else {
        quantize_in_warp(p.to, group, row, column, stores, scale.inverse_factor);
    }
}
