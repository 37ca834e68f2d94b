// Quantized K and V as MMA operands.
// Codes are exact in f16, codes of keys also in bf16.
// Scales of keys multiply partial sums over 32 features.
// Scales of values multiply the softmax weights, in f16 for
// every type of Q.
#pragma once
#include "atoms/e4m3.cuh"
#include "atoms/mma.cuh"
#include "attention/numbers.cuh"
#include "attention/problem.cuh"
#include "dequant/halves.cuh"

constexpr bool IS_CODES = QG_KV >= KV_E4M3, HAS_SCALES = has_scales(QG_KV);
constexpr u32 KV_BITS = Eight<QG_KV>::BITS;
// Operand type of softmax weights and values.
constexpr u32 VALUE_TYPE = HAS_SCALES ? DTYPE_F16 : QG_X;

template <u32 TYPE>
QG_DEVICE void multiply_add(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    const u32 b[2] = {b0, b1};
    if constexpr (TYPE == DTYPE_BF16)
        mma_m16n8k16_bf16(d, a, b);
    else
        mma_m16n8k16_f16(d, a, b);
}

// Pair rounded to the operand type of values.
QG_DEVICE u32 rounded_pair(float low, float high) {
    return f32_to_halves<VALUE_TYPE>(low, high);
}

// f16 pair in the type of Q. The numbers are exact in it.
QG_DEVICE u32 query_pair(u32 pair) {
    if constexpr (QG_X == DTYPE_F16) return pair;
    return f32_to_bf16x2(f16_to_f32(pair & 0xffffu), f16_to_f32(pair >> 16));
}

// Exact operand of the two E4M3 codes in a word's lower
// (HALF 0) or upper half.
template <u32 HALF>
QG_DEVICE u32 e4m3_operand(u32 codes) {
    return query_pair(HALF == 0 ? e4m3_pair_f16<0, 1>(codes) : e4m3_pair_f16<2, 3>(codes));
}

// f16 pair of signed bytes FIRST and FIRST + 1.
// `flipped` holds the bytes with flipped sign bits.
// 1024 + 128 + code is exact in f16.
template <u32 FIRST>
QG_DEVICE u32 signed_bytes_f16(u32 flipped) {
    return sub_f16x2(prmt(flipped, 0x64646464u, FIRST == 0 ? 0x4140 : 0x4342), 0x64806480u);
}

// Four f16 pairs: nibble i of both halves of a word, minus 8.
// The upper nibble of a byte is not shifted, so it counts
// 16 times as much.
// The FMA divides by 16 and subtracts 64 + 8.
QG_DEVICE void nibbles_f16(u32 (&pairs)[4], u32 word) {
#pragma unroll
    for (u32 byte = 0; byte < 2; byte++) {
        const u32 low = byte == 0 ? word : word >> 8;
        pairs[2 * byte] = sub_f16x2(and_or(low, 0x000f000fu, 0x64006400u), 0x64086408u);
        pairs[2 * byte + 1] = fma_f16x2(and_or(low, 0x00f000f0u, 0x64006400u), 0x2c002c00u, 0xd480d480u);
    }
}

// Rows of codes and of scales in shared memory.
// Lanes read keys four rows apart, values eight rows apart.
// The pitches spread these rows over the banks.
struct CodeRows {
    // Features of a lane in a block of a key.
    static constexpr u32 KEY_FEATURES = 8;

    // Q4_0 keys become operands without subtracting 8.
    // f16: a nibble is the bits of a subnormal number.
    // Upper nibbles count 16 times as much. Their features of Q
    // are divided by 16, rounded to a multiple of 2^-24.
    // bf16: a nibble is the upper mantissa of 16 + code.
    // The offset is as small as the codes, so little
    // of the f32 sum cancels.
    // Scores are too large by KEY_OFFSET · block scale ·
    // block sum of Q.
    static constexpr bool HAS_KEY_OFFSET = QG_KV == KV_Q4_0;
    static constexpr float KEY_UNIT = HAS_KEY_OFFSET && QG_X == DTYPE_F16 ? 0x1p-24f : 1.0f;
    // Pairs of 1, and of the weight of Q for upper nibbles.
    static constexpr u32 ONES = QG_X == DTYPE_F16 ? 0x3c003c00u : 0x3f803f80u, UPPER_ONES = QG_X == DTYPE_F16 ? 0x4c004c00u : ONES;
    static constexpr float KEY_OFFSET = (QG_X == DTYPE_F16 ? 8.0f : 16.0f + 8.0f) * KEY_UNIT;

    // A lane's eight adjacent features of a key block: four
    // pairs in the type of Q, in the order of `query_pairs`.
    QG_DEVICE void key_pairs(u32 (&pairs)[4], const u8* at) {
        if constexpr (QG_KV == KV_Q8_0) {
            const u32x2 codes = ld_shared(reinterpret_cast<const u32x2*>(at));
            const u32 low = codes.x ^ 0x80808080u, high = codes.y ^ 0x80808080u;
            pairs[0] = signed_bytes_f16<0>(low), pairs[1] = signed_bytes_f16<2>(low);
            pairs[2] = signed_bytes_f16<0>(high), pairs[3] = signed_bytes_f16<2>(high);
#pragma unroll
            for (u32 i = 0; i < 4; i++) pairs[i] = query_pair(pairs[i]);
        } else {
            const u32 word = ld_shared(reinterpret_cast<const u32*>(at));
#pragma unroll
            for (u32 i = 0; i < 4; i++) {
                if constexpr (QG_X == DTYPE_F16)
                    pairs[i] = (i < 2 ? word : word >> 8) & (i % 2 ? 0x00f000f0u : 0x000f000fu);
                else
                    pairs[i] = and_or(i == 0 ? word << 3 : word >> (4 * i - 3), 0x00780078u, 0x41804180u);
            }
        }
    }

    // The same eight features of a query, from memory order.
    QG_DEVICE void query_pairs(u32 (&pairs)[4], u32x4 eight) {
        const u32 words[4] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            pairs[i] = QG_KV == KV_Q8_0 ? words[i] : prmt(words[i / 2], words[2 + i / 2], i % 2 ? 0x7632 : 0x5410);
            if (HAS_KEY_OFFSET && QG_X == DTYPE_F16 && i % 2) pairs[i] = mul_f16x2(pairs[i], 0x2c002c00u);
        }
    }

    // E4M3: words of a lane's features of a value.
    static constexpr u32 VALUE_WORDS = QG_V / 8 / 4;
    QG_DEVICE void load_value(u32 (&words)[VALUE_WORDS], const u8* at) {
        if constexpr (VALUE_WORDS == 4) {
            const u32x4 v = ld_shared(reinterpret_cast<const u32x4*>(at));
            words[0] = v.x, words[1] = v.y, words[2] = v.z, words[3] = v.w;
        } else {
            const u32x2 v = ld_shared(reinterpret_cast<const u32x2*>(at));
            words[0] = v.x, words[1] = v.y;
        }
    }
    // Pairs of two keys' values, one pair per feature of the
    // words `even` and `odd`.
    QG_DEVICE void e4m3_pairs(u32 (&pairs)[4], u32 even, u32 odd) {
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            const u32 bytes = prmt(even, odd, half ? 0x7362 : 0x5140);
            pairs[half * 2] = e4m3_operand<0>(bytes);
            pairs[half * 2 + 1] = e4m3_operand<1>(bytes);
        }
    }

    // Q8_0 and Q4_0: pairs of two keys' values, unscaled.
    // `both` has 16 bits of each key, thus at most four pairs.
    static constexpr u32 NEIGHBOURS = 16 / KV_BITS;
    QG_DEVICE void value_pairs(u32 (&pairs)[4], u32 both) {
        if constexpr (QG_KV == KV_Q4_0) {
            nibbles_f16(pairs, both);
        } else {
            const u32 flipped = both ^ 0x80808080u;
            pairs[0] = sub_f16x2(prmt(flipped, 0x64646464u, 0x4240), 0x64806480u);
            pairs[1] = sub_f16x2(prmt(flipped, 0x64646464u, 0x4341), 0x64806480u);
        }
    }
    // Softmax weights of two keys times the scales of their
    // block `block`. `scales` has the scales of all blocks.
    template <u32 WORDS>
    QG_DEVICE u32 scaled_weights(u32 weights, const u32 (&scales)[WORDS], u32 block) {
        const u32 even = scales[block / 2], odd = scales[WORDS / 2 + block / 2];
        return mul_f16x2(weights, prmt(even, odd, block % 2 ? 0x7632 : 0x5410));
    }

    // Dequantizes feature `column`, whose code is in the
    // byte at `at`.
    QG_DEVICE float number(const u8* at, u32 column, float scale) {
        const u32 byte = ld_shared(at);
        if constexpr (QG_KV == KV_E4M3) return e4m3_to_f32_or_nan(byte);
        if constexpr (QG_KV == KV_Q8_0) return (float)((i32)(byte << 24) >> 24) * scale;
        return ((float)(i32)(byte >> (column % 2 * 4) & 15u) - 8.0f) * scale;
    }
};

// Softmax weights are multiplied by 2^WEIGHT_EXPONENT.
// Otherwise products with small scales could be subnormal.
constexpr float WEIGHT_EXPONENT = HAS_SCALES ? 10.0f : 0.0f;
// Whether a weight times one of two scales may overflow f16:
// a scale is at least 32, infinite or NaN.
QG_DEVICE bool may_overflow(u32 scales) {
    return (((scales & 0x7fff7fffu) + 0x30003000u) & 0x80008000u) != 0;
}

// Marks infinities and NaN among a word's values; 0 if none.
// For formats without scales.
QG_DEVICE u32 not_finite(u32 word) {
    constexpr u32 BYTES = QG_KV == KV_E4M3 ? 0x01010101u : 0x00010001u;
    constexpr u32 LOW = QG_KV == KV_E4M3 ? 0x7fu : 0x7fffu, LEAST = QG_KV == KV_E4M3 ? 0x7fu : QG_KV == DTYPE_BF16 ? 0x7f80u : 0x7c00u;
    // The addition carries into the sign bit of such values.
    return ((word & LOW * BYTES) + (LOW + 1 - LEAST) * BYTES) & (LOW + 1) * BYTES;
}
