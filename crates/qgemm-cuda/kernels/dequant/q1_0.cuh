// Q1_0: d where a bit is set, -d elsewhere.
#pragma once
#include "dequant/block_scale.cuh"

// A codebook of -1 and 1.
struct Signs {};

// The bits of quad `quad`, one a byte.
QG_DEVICE u32 sign_bits(const KTile& kt, u32 quad) {
    using Codes = KTile::Codes0;
    return Codes::word_of(kt.codes0, quad) >> Codes::shift(quad, 0) & 0x01010101u;
}

// The numbers of quad `quad` as signed bytes, in code order.
QG_DEVICE u32 codebook_signed_bytes(Signs, const KTile& kt, u32 quad) {
    // 1, or -1: 0xfe + 1.
    return (sign_bits(kt, quad) ^ 0x01010101u) * 0xfeu + 0x01010101u;
}

struct Dequant : BlockScale {
    QG_DEVICE constexpr Signs table() { return {}; }
    QG_DEVICE u32 pair_f16(const KTile& kt, u32 quad, u32 pair) {
        const u32 bits = sign_bits(kt, quad) >> 8 * pair & 0x00010001u;
        return bits << 15 ^ 0xbc00bc00u;
    }
};
