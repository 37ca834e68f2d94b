// Integer byte scales times a super-block factor.
#pragma once
#include "dequant/k_tile.cuh"

// Scales and minimums of a super-block: integers times a unit.
// Formats define `unit(k_tile, row, kind)`.
// They also define
// `integers(k_tile, row, half, pair, kind)`.
// Its two low bytes are sub-blocks
// 8 half + 2 pair and the next.
enum class SuperBlockPart { SCALES, MINS };

// Bytes 2 `pair` and 2 `pair` + 1 of eight bytes.
QG_DEVICE u32 byte_pair(u32 low, u32 high, u32 pair) { return prmt(low, high, 0x10u + 0x22u * pair); }

// 2^23: an f32 of this size has an ulp of 1.
constexpr float BIASED_BYTE = 8388608.0f;

// 2^23 + byte `index` of `word`: converts with one PRMT.
QG_DEVICE float biased_byte(u32 word, u32 index) {
    return bits_to_f32(prmt(word, 0x4b000000u, 0x7440u | index));
}

// (byte `index` of `bytes` - OFFSET) * d, rounded once.
template <u32 OFFSET = 0>
QG_DEVICE float scaled_byte(u32 bytes, u32 index, float d) {
    // The product with d is exact only for a power of two.
    if constexpr (OFFSET == 0) return fma_f32(biased_byte(bytes, index), d, -BIASED_BYTE * d);
    return (biased_byte(bytes, index) - (BIASED_BYTE + OFFSET)) * d;
}
