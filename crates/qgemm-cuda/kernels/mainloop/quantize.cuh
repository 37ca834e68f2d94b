// What both kernels that quantize X share: reading groups of columns, scales, and codes. All arithmetic is single operations of
// f32, each rounded for itself, in the order of the host's reference, whose bits every device has.
#pragma once
#include "atoms/float.cuh"
#include "atoms/fp8.cuh"
#include "atoms/launch.cuh"
#include "atoms/memory.cuh"
#include "atoms/narrow_store.cuh"
#include "atoms/rounded.cuh"
#include "atoms/sync.cuh"
#include "atoms/warp.cuh"
#include "generated/abi.cuh"
#include "mainloop/e4m3_code.cuh"

// The parameter of kernels that quantize.
struct QuantizeParams {
    QuantizeShape shape;
    QuantizePointers at;
};

constexpr u32 CODE_INT8 = 0, CODE_E4M3 = 1, CODE_E2M1 = 2;
constexpr u32 SCALE_NONE = 0, SCALE_F32 = 1, SCALE_E8M0 = 2, SCALE_E4M3 = 3;
constexpr u32 FACTOR_NONE = 0, FACTOR_GIVEN = 1, FACTOR_PER_TOKEN = 2;

// Columns that a thread quantizes at once.
constexpr u32 GROUP = 8;
// Lanes that share a scale: 2 to 32 of a warp, whose columns follow one another.
constexpr u32 BLOCK_LANES = QG_BLOCK / GROUP;
constexpr u32 SOURCE_BYTES = QG_X_DTYPE == DTYPE_F32 ? 4 : 2;
constexpr u32 SOURCE_WORDS = GROUP * SOURCE_BYTES / 4;
constexpr u32 CODE_BITS = QG_CODE == CODE_E2M1 ? 4 : 8;
constexpr u32 INFINITY_BITS = 0x7f800000u;
constexpr u32 MAGNITUDE = 0x7fffffffu;
// f32's smallest normal number and its inverse.
constexpr u32 SMALLEST_BITS = 0x00800000u, LARGEST_FACTOR_BITS = 0x7e800000u;
constexpr u32 NAN_BITS = 0x7fc00000u;
// The largest number of a code, and that of NVFP4's codes times that of its scales.
constexpr float MOST = QG_CODE == CODE_E4M3 ? 448.0f : 127.0f;
constexpr float MOST_NVFP4 = 448.0f * 6.0f;

// Eight neighbouring elements of X as they are stored.
struct SourceGroup {
    u32 word[SOURCE_WORDS];

    QG_DEVICE float value(const SourceGroup& group, u32 i) {
        if constexpr (SOURCE_BYTES == 4) return bits_to_f32(group.word[i % SOURCE_WORDS]);
        const u32 bits = group.word[i / 2] >> (16 * (i % 2)) & 0xffffu;
        return QG_X_DTYPE == DTYPE_F16 ? f16_to_f32(bits) : bf16_to_f32(bits);
    }

    // Columns [column, column + GROUP) of a row; those beyond the last are zeros.
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

QG_DEVICE u32 larger(u32 a, u32 b) {
    return a > b ? a : b;
}

// The bits of the largest magnitude of a group, which order like numbers; those of infinity and NaN are the largest.
QG_DEVICE u32 largest_of(const SourceGroup& group) {
    u32 largest = 0;
#pragma unroll
    for (u32 i = 0; i < GROUP; i++)
        largest = larger(largest, f32_to_bits(SourceGroup::value(group, i)) & MAGNITUDE);
    return largest;
}

// The same of the values that are finite.
QG_DEVICE u32 largest_finite_of(const SourceGroup& group) {
    u32 largest = 0;
#pragma unroll
    for (u32 i = 0; i < GROUP; i++) {
        const u32 bits = f32_to_bits(SourceGroup::value(group, i)) & MAGNITUDE;
        largest = larger(largest, bits < INFINITY_BITS ? bits : 0);
    }
    return largest;
}

// The scale that maps the magnitude with these bits, which is finite, to `most`: a normal number, so that its inverse is finite.
QG_DEVICE float f32_scale(u32 largest, float most) {
    return bits_to_f32(larger(f32_to_bits(div_rn_f32(bits_to_f32(largest), most)), SMALLEST_BITS));
}

// 1 / factor; NaN of a factor that is no normal number, or whose inverse is none.
QG_DEVICE float checked_inverse(float factor) {
    const u32 bits = f32_to_bits(factor);
    return bits >= SMALLEST_BITS && bits <= LARGEST_FACTOR_BITS ? rcp_rn_f32(factor) : bits_to_f32(NAN_BITS);
}

// A number as E2M1, to nearest even; what is too large becomes the largest one.
QG_DEVICE u32 f32_to_e2m1(float value) {
    const u32 bits = f32_to_bits(value), magnitude = bits & MAGNITUDE;
    const u32 normal = (magnitude - (126u << 23) + 0x1fffffu + (magnitude >> 22 & 1u)) >> 22;
    // Below 1 numbers are multiples of 1/2, as f32's beside 2^22 are.
    const u32 subnormal = f32_to_bits(bits_to_f32(magnitude) + 4194304.0f) - 0x4a800000u;
    const u32 code = magnitude < 0x3f800000u ? subnormal : normal;
    return (bits >> 28 & 8u) | (code < 7u ? code : 7u);
}

// What values of a block are multiplied with.
struct BlockScale {
    // Of the token or of all X, 1 where there is no factor; and of the block.
    float inverse_factor, inverse;
    // As it is stored.
    u32 stored;
    // Whether values are numbers; codes are 0 where they are not.
    bool is_number;

    QG_DEVICE BlockScale of_block(u32 largest, float inverse_factor) {
        BlockScale scale = {inverse_factor, 0.0f, 0, largest < INFINITY_BITS};
        if constexpr (QG_SCALE == SCALE_F32) {
            const float f = f32_scale(scale.is_number ? largest : 0, MOST);
            scale.stored = scale.is_number ? f32_to_bits(f) : NAN_BITS;
            scale.inverse = rcp_rn_f32(f);
        } else if constexpr (QG_SCALE == SCALE_E8M0) {
            // The power of two that puts the largest into E2M1's top binade, or no higher than 448 = 1.75 * 2^8.
            const i32 exponent = (i32)(largest >> 23);
            const i32 code = QG_CODE == CODE_E4M3 ? exponent + ((largest & 0x7fffffu) > 0x600000u) - 8 : exponent - 2;
            const u32 power = code > 1 ? code : 1;
            scale.stored = scale.is_number ? power : 0xffu;
            scale.inverse = bits_to_f32((254 - power) << 23);
        } else if constexpr (QG_SCALE == SCALE_E4M3) {
            scale.is_number &= inverse_factor == inverse_factor;
            const float share = mul_rn_f32(mul_rn_f32(bits_to_f32(largest), inverse_factor), 1.0f / 6.0f);
            scale.stored = scale.is_number ? f32_to_e4m3(share) : 0x7fu;
            const float f = e4m3_to_f32(scale.stored);
            scale.inverse = scale.stored == 0 ? 0.0f : rcp_rn_f32(f);
        }
        return scale;
    }
};

// The codes of a group: two words, of E2M1 one.
QG_DEVICE u32x2 codes_of(const SourceGroup& group, const BlockScale& scale) {
    float scaled[GROUP];
#pragma unroll
    for (u32 i = 0; i < GROUP; i++) {
        const float value = SourceGroup::value(group, i);
        if constexpr (QG_SCALE == SCALE_NONE) {
            const bool is_finite = (f32_to_bits(value) & MAGNITUDE) < INFINITY_BITS;
            scaled[i] = is_finite ? mul_rn_f32(value, scale.inverse_factor) : bits_to_f32(NAN_BITS);
        } else {
            const float of_token = QG_FACTOR == FACTOR_NONE ? value : mul_rn_f32(value, scale.inverse_factor);
            scaled[i] = mul_rn_f32(of_token, scale.inverse);
        }
    }
    u32 word[2] = {0, 0};
#pragma unroll
    for (u32 i = 0; i < GROUP; i += 4) {
        const float* four = &scaled[i];
        if constexpr (QG_CODE == CODE_INT8) {
            // Beside 1.5 * 2^23 neighbours are 1 apart, so that sums are rounded to integers, which their low bytes hold.
            const auto rounded = [&](u32 j) { return f32_to_bits(four[j] + 12582912.0f); };
            word[i / 4] = prmt(prmt(rounded(0), rounded(1), 0x0040), prmt(rounded(2), rounded(3), 0x0040), 0x5410);
        } else if constexpr (QG_CODE == CODE_E4M3) {
            word[i / 4] = f32_to_e4m3x2(four[0], four[1]) | f32_to_e4m3x2(four[2], four[3]) << 16;
        } else {
#pragma unroll
            for (u32 j = 0; j < 4; j++) word[0] |= f32_to_e2m1(four[j]) << (i + j) * 4;
        }
    }
    if constexpr (QG_SCALE == SCALE_NONE) return {word[0], word[1]};
    return {scale.is_number ? word[0] : 0, scale.is_number ? word[1] : 0};
}

QG_DEVICE void store_codes(u8* codes_row, u32 column, u32x2 codes) {
    u8* at = codes_row + (u64)column * CODE_BITS / 8;
    if constexpr (CODE_BITS == 8)
        st_global_v2(at, codes);
    else
        st_global_u32(at, codes.x);
}

// Quantizes a group of a warp's columns in a format whose blocks lie in warps, and stores it with its scales and sums, `stores`
// of the row that has it. All lanes take part.
QG_DEVICE void quantize_in_warp(const QuantizeParams& p, const SourceGroup& group, u64 row, u32 column, bool stores,
                                float inverse_factor) {
    u32 largest = largest_of(group);
#pragma unroll
    for (u32 mask = 1; mask < BLOCK_LANES; mask *= 2) largest = larger(largest, shfl_xor_u32(largest, mask));
    const BlockScale scale = BlockScale::of_block(largest, inverse_factor);
    const u32x2 codes = codes_of(group, scale);
    u8* scales = reinterpret_cast<u8*>(p.at.scales) + row * p.at.scales_row;
    if (stores) store_codes(reinterpret_cast<u8*>(p.at.codes) + row * p.at.codes_row, column, codes);
    if constexpr (QG_SCALE == SCALE_F32) {
        if (stores && column % QG_BLOCK == 0) st_global_u32(scales + (u64)(column / QG_BLOCK) * 4, scale.stored);
    } else {
        // Four scales of a byte each are a word, which the first lane of their blocks stores.
        u32 word = scale.stored << (column / QG_BLOCK % 4 * 8);
        word |= shfl_xor_u32(word, BLOCK_LANES);
        word |= shfl_xor_u32(word, 2 * BLOCK_LANES);
        if (stores && column % (4 * QG_BLOCK) == 0) st_global_u32(scales + column / QG_BLOCK, word);
    }
    if constexpr (QG_SUM_SPAN > 0) {
        const i32 own = dp4a((i32)codes.x, 0x01010101, dp4a((i32)codes.y, 0x01010101, 0));
        u32 sum = (u32)own;
#pragma unroll
        for (u32 mask = 1; mask < QG_SUM_SPAN / GROUP; mask *= 2) sum += shfl_xor_u32(sum, mask);
        u8* sums = reinterpret_cast<u8*>(p.at.sums) + row * p.at.sums_row;
        if (stores && column % QG_SUM_SPAN == 0)
            st_global_u32(sums + (u64)(column / QG_SUM_SPAN) * 4,
                          f32_to_bits(mul_rn_f32((float)(i32)sum, bits_to_f32(scale.stored))));
    }
}

// The inverse of the factor that is given; 1 where there is none.
QG_DEVICE float given_inverse(const QuantizeParams& p) {
    if constexpr (QG_FACTOR != FACTOR_GIVEN) return 1.0f;
    return checked_inverse(bits_to_f32(ld_global_u32(reinterpret_cast<const u8*>(p.at.factor))));
}
