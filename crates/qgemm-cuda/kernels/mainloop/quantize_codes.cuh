// Quantization of groups of eight columns:
// scales, codes, stores.
// Kernels that quantize X and kernels that quantize their
// normalized output share it.
// A group is a type with `value(group, i)`.
// All arithmetic is single f32 operations, each rounded once,
// in the order of the host reference:
// all devices give identical bits.
#pragma once
#include "atoms/float.cuh"
#include "atoms/fp8.cuh"
#include "atoms/half_order.cuh"
#include "atoms/launch.cuh"
#include "atoms/memory.cuh"
#include "atoms/narrow_store.cuh"
#include "atoms/numeric.cuh"
#include "atoms/rounded.cuh"
#include "atoms/sync.cuh"
#include "atoms/warp.cuh"
#include "generated/abi.cuh"
#include "mainloop/column_group.cuh"
#include "mainloop/e4m3_code.cuh"

constexpr u32 CODE_INT8 = 0, CODE_E4M3 = 1, CODE_E2M1 = 2;
constexpr u32 SCALE_NONE = 0, SCALE_F32 = 1, SCALE_E8M0 = 2, SCALE_E4M3 = 3;
constexpr u32 FACTOR_NONE = 0, FACTOR_GIVEN = 1, FACTOR_PER_TOKEN = 2;

// Lanes per scale: 2 to 32 of a warp, with consecutive columns.
constexpr u32 BLOCK_LANES = QG_BLOCK / GROUP;
constexpr u32 CODE_BITS = QG_CODE == CODE_E2M1 ? 4 : 8;
constexpr u32 INFINITY_BITS = 0x7f800000u;
constexpr u32 MAGNITUDE = 0x7fffffffu;
// f32's smallest normal number, and its inverse.
constexpr u32 SMALLEST_BITS = 0x00800000u, LARGEST_FACTOR_BITS = 0x7e800000u;
constexpr u32 NAN_BITS = 0x7fc00000u;
// Largest code value; for NVFP4 times its largest scale.
constexpr float MOST = QG_CODE == CODE_E4M3 ? 448.0f : 127.0f;
constexpr float MOST_NVFP4 = 256.0f * 6.0f;
// 1.5 · 2^23: near it f32 has an ulp of 1. Adding it rounds to
// an integer, which is then in the low bits.
constexpr float ROUNDER = 12582912.0f;

QG_DEVICE u32 larger(u32 a, u32 b) {
    return a > b ? a : b;
}

// Minimum of two magnitudes.
QG_DEVICE float smaller(float a, float b) {
    return bits_to_f32(f32_to_bits(a) < f32_to_bits(b) ? f32_to_bits(a) : f32_to_bits(b));
}

// Bits of a group's largest magnitude, which order like numbers.
// Infinity and NaN are the largest.
template <class Group>
QG_DEVICE u32 largest_of(const Group& group) {
    u32 largest = 0;
#pragma unroll
    for (u32 i = 0; i < GROUP; i++)
        largest = larger(largest, f32_to_bits(Group::value(group, i)) & MAGNITUDE);
    return largest;
}

// `largest_of` over finite values.
template <class Group>
QG_DEVICE u32 largest_finite_of(const Group& group) {
    u32 largest = 0;
#pragma unroll
    for (u32 i = 0; i < GROUP; i++) {
        const u32 bits = f32_to_bits(Group::value(group, i)) & MAGNITUDE;
        largest = larger(largest, bits < INFINITY_BITS ? bits : 0);
    }
    return largest;
}

// Scale that maps a finite magnitude to `most`.
// It is a normal number, so its inverse is finite.
QG_DEVICE float f32_scale(u32 largest, float most) {
    return bits_to_f32(larger(f32_to_bits(div_rn_f32(bits_to_f32(largest), most)), SMALLEST_BITS));
}

// 1 / factor; NaN if factor or its inverse is not normal.
QG_DEVICE float checked_inverse(float factor) {
    const u32 bits = f32_to_bits(factor);
    return bits >= SMALLEST_BITS && bits <= LARGEST_FACTOR_BITS ? rcp_rn_f32(factor) : bits_to_f32(NAN_BITS);
}

// Magnitude → E2M1, nearest even, saturating.
QG_DEVICE u32 f32_to_e2m1(float magnitude) {
    const float least = smaller(magnitude, 6.0f);
    // Near 2^22 times the binade's first number, f32's ulp is half
    // of that number: the sum rounds to two significant bits.
    // Below 1 the step is that of [1, 2).
    const u32 binade = larger(f32_to_bits(least), 0x3f800000u) & 0x7f800000u;
    const u32 sum = f32_to_bits(least + bits_to_f32(binade + (22u << 23)));
    // The low three bits are 2 or 3 in a binade, less below 1, and
    // 4 at the start of the next binade.
    return (sum & 7u) + (binade >> 22) - (127u << 1);
}

// Two numbers as f16, nearest even.
QG_DEVICE u32 f16_pair(float low, float high) {
#if QG_VARIANT >= 80
    return f32_to_f16x2(low, high);
#else
    return f32_to_f16(low) | f32_to_f16(high) << 16;
#endif
}

// E2M1 rounding errors of a pair of f16 magnitudes.
// The low byte of each result is 32 times the error, as s8.
QG_DEVICE u32 e2m1_errors(u32 pair) {
    constexpr u32 ONE = 0x3c003c00u, SIX = 0x46004600u, BINADE = 0x7c007c00u, TIMES_512 = 9u << 10 | 9u << 26;
    // 48: near it f16 has an ulp of 1/32.
    constexpr u32 FORTY_EIGHT = 0x52005200u;
    const u32 least = min_f16x2(pair, SIX);
    const u32 beside = (max_f16x2(least, ONE) & BINADE) + TIMES_512;
    const u32 number = sub_f16x2(fma_f16x2(least, ONE, beside), beside);
    return fma_f16x2(sub_f16x2(pair, number), ONE, FORTY_EIGHT);
}

// Scale of a block.
struct BlockScale {
    // Inverses of the token or tensor factor (1 if none) and of
    // the block scale.
    float inverse_factor, inverse;
    // Stored form.
    u32 stored;
    // False if the block has NaN or infinity; its codes are then 0.
    bool is_number;

    // E2M1 blocks choose among several scales; this is scale CHOICE.
    template <u32 CHOICE = 0>
    QG_DEVICE BlockScale of_block(u32 largest, float inverse_factor) {
        BlockScale scale = {inverse_factor, 0.0f, 0, largest < INFINITY_BITS};
        if constexpr (QG_SCALE == SCALE_F32) {
            const float f = f32_scale(scale.is_number ? largest : 0, MOST);
            scale.stored = scale.is_number ? f32_to_bits(f) : NAN_BITS;
            scale.inverse = rcp_rn_f32(f);
        } else if constexpr (QG_SCALE == SCALE_E8M0) {
            // Power of two that maps the maximum into E2M1's top binade.
            // For E4M3: to at most 448 = 1.75 · 2^8.
            const i32 exponent = (i32)(largest >> 23);
            const i32 code = QG_CODE == CODE_E4M3 ? exponent + ((largest & 0x7fffffu) > 0x600000u) - 8 : exponent - 2;
            const u32 power = (code > 1 ? code : 1) + CHOICE;
            scale.stored = scale.is_number ? power : 0xffu;
            scale.inverse = bits_to_f32((254 - power) << 23);
        } else if constexpr (QG_SCALE == SCALE_E4M3) {
            scale.is_number &= inverse_factor == inverse_factor;
            constexpr float SHARE = CHOICE == 0 ? 1.0f / 6.0f : CHOICE == 1 ? 1.0f / 4.0f : 1.0f / 6.5f;
            const float share = mul_rn_f32(mul_rn_f32(bits_to_f32(largest), inverse_factor), SHARE);
            scale.stored = scale.is_number ? f32_to_e4m3(share) : 0x7fu;
            const float f = e4m3_to_f32(scale.stored);
            scale.inverse = scale.stored == 0 ? 0.0f : rcp_rn_f32(f);
        }
        return scale;
    }
};

// Byte codes of a group, two words.
template <class Group>
QG_DEVICE u32x2 codes_of(const Group& group, const BlockScale& scale) {
    float scaled[GROUP];
#pragma unroll
    for (u32 i = 0; i < GROUP; i++) {
        const float value = Group::value(group, i);
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
            const auto rounded = [&](u32 j) { return f32_to_bits(four[j] + ROUNDER); };
            word[i / 4] = prmt(prmt(rounded(0), rounded(1), 0x0040), prmt(rounded(2), rounded(3), 0x0040), 0x5410);
        } else {
            word[i / 4] = f32_to_e4m3x2(four[0], four[1]) | f32_to_e4m3x2(four[2], four[3]) << 16;
        }
    }
    if constexpr (QG_SCALE == SCALE_NONE) return {word[0], word[1]};
    return {scale.is_number ? word[0] : 0, scale.is_number ? word[1] : 0};
}

// Number of scales that an E2M1 block chooses from.
constexpr u32 CHOICES = QG_SCALE == SCALE_E4M3 ? 3 : 2;

// E2M1 block: the codes of the lane's group, and the scale of
// least error, equal in all lanes of the block.
struct E2m1Block {
    u32 word;
    BlockScale scale;

    template <class Group>
    QG_DEVICE E2m1Block of(const Group& group, u32 largest, float inverse_factor) {
        BlockScale scales[3] = {BlockScale::of_block<0>(largest, inverse_factor), BlockScale::of_block<1>(largest, inverse_factor), {}};
        if constexpr (CHOICES > 2) scales[2] = BlockScale::of_block<2>(largest, inverse_factor);
        float of_token[GROUP];
        // Values under the first scale; other scales are within a
        // small ratio of it.
        u32 halves[GROUP / 2];
#pragma unroll
        for (u32 i = 0; i < GROUP; i++) {
            const float value = Group::value(group, i);
            of_token[i] = QG_FACTOR == FACTOR_NONE ? value : mul_rn_f32(value, inverse_factor);
        }
#pragma unroll
        for (u32 i = 0; i < GROUP; i += 2) {
            const auto scaled = [&](u32 j) { return smaller(scaled_of(of_token[i + j], scales[0]), 8.0f); };
            halves[i / 2] = f16_pair(scaled(0), scaled(1));
        }
        // Sums of squared errors, in units of 1/32 of the scale.
        i32 errors[CHOICES];
#pragma unroll
        for (u32 choice = 0; choice < CHOICES; choice++) {
            const u32 ratio = ratio_of(scales[0], scales[choice]);
            u32 off[GROUP / 2];
#pragma unroll
            for (u32 i = 0; i < GROUP / 2; i++) off[i] = e2m1_errors(choice == 0 ? halves[i] : mul_f16x2(halves[i], ratio));
            const i32 low = (i32)prmt(off[0], off[1], 0x6420), high = (i32)prmt(off[2], off[3], 0x6420);
            errors[choice] = dp4a(low, low, dp4a(high, high, 0));
        }
        static_assert(GROUP == 8, "errors of a group are two words");
#pragma unroll
        for (u32 mask = 1; mask < BLOCK_LANES; mask *= 2)
#pragma unroll
            for (u32 choice = 0; choice < CHOICES; choice++)
                errors[choice] += (i32)shfl_xor_u32((u32)errors[choice], mask);
        E2m1Block block = {0, scales[0]};
        float least = of_scale<0>(errors[0], scales[0]);
        take_nearer<1>(block.scale, least, errors[1], scales[1]);
        if constexpr (CHOICES > 2) take_nearer<2>(block.scale, least, errors[CHOICES - 1], scales[2]);
#pragma unroll
        for (u32 i = 0; i < GROUP; i++) {
            const u32 sign = f32_to_bits(of_token[i]) >> 28 & 8u;
            block.word |= (f32_to_e2m1(scaled_of(of_token[i], block.scale)) | sign) << i * 4;
        }
        if (!block.scale.is_number) block.word = 0;
        return block;
    }

    QG_DEVICE float scaled_of(float of_token, const BlockScale& scale) {
        return mul_rn_f32(bits_to_f32(f32_to_bits(of_token) & MAGNITUDE), scale.inverse);
    }

    // f16x2 ratio from the first scale to another scale.
    QG_DEVICE u32 ratio_of(const BlockScale& first, const BlockScale& scale) {
        if constexpr (QG_SCALE != SCALE_E4M3) return 0x38003800u;
        const float ratio = mul_rn_f32(e4m3_to_f32(first.stored), scale.inverse);
        return f16_pair(ratio, ratio);
    }

    // Squared error in absolute units; for E8M0 in units of the
    // first scale, because its square may overflow.
    // A zero NVFP4 scale never wins the comparison.
    template <u32 CHOICE>
    QG_DEVICE float of_scale(i32 error, const BlockScale& scale) {
        if constexpr (QG_SCALE != SCALE_E4M3) return CHOICE == 0 ? (float)error : (float)error * 4.0f;
        const float number = e4m3_to_f32(scale.stored), square = number * number;
        return scale.stored > 0 ? mul_rn_f32((float)error, square) : bits_to_f32(INFINITY_BITS);
    }

    template <u32 CHOICE>
    QG_DEVICE void take_nearer(BlockScale& nearest, float& least, i32 error, const BlockScale& scale) {
        const float own = of_scale<CHOICE>(error, scale);
        if (own < least) nearest = scale, least = own;
    }
};

QG_DEVICE void store_codes(u8* codes_row, u32 column, u32x2 codes) {
    u8* at = codes_row + (u64)column * CODE_BITS / 8;
    if constexpr (CODE_BITS == 8)
        st_global_v2(at, codes);
    else
        st_global_u32(at, codes.x);
}

// Quantizes a warp's group and stores codes, scales and sums.
// Blocks must lie within the warp.
// `stores` is false for rows that the lane must not write.
// All lanes take part.
template <class Group>
QG_DEVICE void quantize_in_warp(const QuantizePointers& to, const Group& group, u64 row, u32 column, bool stores,
                                float inverse_factor) {
    u32 largest = largest_of(group);
#pragma unroll
    for (u32 mask = 1; mask < BLOCK_LANES; mask *= 2) largest = larger(largest, shfl_xor_u32(largest, mask));
    BlockScale scale;
    u32x2 codes;
    if constexpr (QG_CODE == CODE_E2M1) {
        const E2m1Block block = E2m1Block::of(group, largest, inverse_factor);
        scale = block.scale;
        codes = {block.word, 0};
    } else {
        scale = BlockScale::of_block(largest, inverse_factor);
        codes = codes_of(group, scale);
    }
    u8* scales = reinterpret_cast<u8*>(to.scales) + row * to.scales_row;
    if (stores) store_codes(reinterpret_cast<u8*>(to.codes) + row * to.codes_row, column, codes);
    if constexpr (QG_SCALE == SCALE_F32) {
        if (stores && column % QG_BLOCK == 0) st_global_u32(scales + (u64)(column / QG_BLOCK) * 4, scale.stored);
    } else {
        // Four byte scales form a word; the first lane of their
        // blocks stores it.
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
        u8* sums = reinterpret_cast<u8*>(to.sums) + row * to.sums_row;
        if (stores && column % QG_SUM_SPAN == 0)
            st_global_u32(sums + (u64)(column / QG_SUM_SPAN) * 4,
                          f32_to_bits(mul_rn_f32((float)(i32)sum, bits_to_f32(scale.stored))));
    }
}

// Inverse of the given tensor factor; 1 if none.
QG_DEVICE float given_inverse(const QuantizePointers& to) {
    if constexpr (QG_FACTOR != FACTOR_GIVEN) return 1.0f;
    return checked_inverse(bits_to_f32(ld_global_u32(reinterpret_cast<const u8*>(to.factor))));
}
