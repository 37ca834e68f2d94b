// Indexer operands of `mma.sync`: features of queries and
// keys, in 16-byte chunks.
// Chips whose `mma.sync` lacks E4M3 convert it to f16, which
// is exact. On Hopper only wgmma has E4M3.
#pragma once
#include "atoms/e4m3.cuh"
#include "mainloop/indexer_keys.cuh"

constexpr bool IS_E4M3 = QG_X == KV_E4M3;
constexpr bool IS_DECODED = IS_E4M3 && (QG_VARIANT < 89 || QG_VARIANT == 90);
// Bytes of a feature in memory; features of a 16-byte
// operand chunk.
constexpr u32 FEATURE_BYTES = IS_E4M3 ? 1 : 2;
constexpr u32 CHUNK_FEATURES = IS_E4M3 && !IS_DECODED ? 16 : 8;
constexpr u32 CHUNK_BYTES = CHUNK_FEATURES * FEATURE_BYTES;
// Chunks of a row.
constexpr u32 CHUNKS = QG_FEATURES / CHUNK_FEATURES;

#if QG_VARIANT < 89
// Upper bytes of two halves as an f16 pair. NaN is selected,
// because `e4m3_upper_bytes_f16` spills here on Turing.
QG_DEVICE u32 decoded_pair(u32 codes) {
    const u32 pair = mul_f16x2((codes & 0x80008000u) | ((codes & 0x7f007f00u) >> 1), 0x5c005c00u);
    const u32 nan_low = (pair & 0x7fffu) == 0x5f80u ? 0x7fffu : 0, nan_high = (pair & 0x7fff0000u) == 0x5f800000u ? 0x7fff0000u : 0;
    return pair | nan_low | nan_high;
}
QG_DEVICE u32x4 decoded(u32 low, u32 high) {
    return {decoded_pair(prmt(low, 0, 0x1404)), decoded_pair(prmt(low, 0, 0x3424)), decoded_pair(prmt(high, 0, 0x1404)),
            decoded_pair(prmt(high, 0, 0x3424))};
}
#else
QG_DEVICE u32x4 decoded(u32 low, u32 high) {
    return {e4m3_pair_f16<0, 1>(low), e4m3_pair_f16<2, 3>(low), e4m3_pair_f16<0, 1>(high), e4m3_pair_f16<2, 3>(high)};
}
#endif

// Loads the chunk at `at`. ALIGNED: the address is a multiple
// of the chunk's bytes.
template <bool ALIGNED>
QG_DEVICE u32x4 load_chunk(const u8* at) {
    u32 words[4] = {};
    constexpr u32 WORDS = CHUNK_BYTES / 4;
    if constexpr (ALIGNED) {
        if constexpr (WORDS == 4) return ld_global_v4(at);
#pragma unroll
        for (u32 i = 0; i < WORDS; i++) words[i] = ld_global_u32(at + 4 * i);
    } else {
#pragma unroll
        for (u32 i = 0; i < CHUNK_FEATURES; i++) {
            const u32 feature = IS_E4M3 ? ld_global_cached_u8(at + i) : ld_global_cached_u16(at + 2 * i);
            words[i * FEATURE_BYTES / 4] |= feature << (i * FEATURE_BYTES % 4 * 8);
        }
    }
    if constexpr (IS_DECODED) return decoded(words[0], words[1]);
    return {words[0], words[1], words[2], words[3]};
}
