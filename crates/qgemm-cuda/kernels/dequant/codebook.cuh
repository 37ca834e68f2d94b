// Codebook lookup with prmt: 4-bit codes into 16 signed bytes.
#pragma once
#include "dequant/k_tile.cuh"

// Table entries 4i..4i+3, each plus 128, as bytes of a word.
struct Codebook {
    u32 word[4];
};

QG_DEVICE constexpr Codebook iq4_table() {
    return {{0x3f2d1801u, 0x766a5d4fu, 0xa6998d81u, 0xf1d9c5b5u}};
}
// E2M1 values times 2.
QG_DEVICE constexpr Codebook e2m1_table() {
    return {{0x83828180u, 0x8c888684u, 0x7d7e7f80u, 0x74787a7cu}};
}

// Table entries of a word's eight nibbles, lower half first.
struct CodebookBytes {
    u32 low, high;

    QG_DEVICE CodebookBytes of(const Codebook& table, u32 word) {
        // prmt selectors have three index bits.
        // Bit 3 of each nibble selects the half of the table.
        const u32 index = word & 0x77777777u;
        const u32 upper = (word >> 1) & 0x44444444u;
        return {prmt(prmt(table.word[0], table.word[1], index), prmt(table.word[2], table.word[3], index), (upper & 0xffffu) | 0x3210u),
                prmt(prmt(table.word[0], table.word[1], index >> 16), prmt(table.word[2], table.word[3], index >> 16),
                     (upper >> 16) | 0x3210u)};
    }
};

// Pair `pair` of quad `quad` in f16.
// The compiler shares a word's two lookups
// between its two quads.
QG_DEVICE u32 codebook_pair_f16(const Codebook& table, const KTile& kt, u32 quad, u32 pair) {
    const CodebookBytes entries = CodebookBytes::of(table, kt.codes0.word[quad / 2]);
    // The pair's first value is nibble 0 + quad + 2·pair
    // of the low half.
    // Its second value is this nibble of the upper half
    // (prepack.rs: byte order v0 v2 v1 v3).
    const u32 nibble = quad % 2 + 2 * pair;
    const u32 bytes = prmt(entries.low, entries.high, nibble | (nibble << 4) | ((nibble + 4) << 8) | ((nibble + 4) << 12));
    return sub_f16x2(and_or(bytes, 0x00ff00ffu, 0x64006400u), 0x64806480u);
}

// The four entries of quad `quad` as signed
// bytes, in code order.
QG_DEVICE u32 codebook_signed_bytes(const Codebook& table, const KTile& kt, u32 quad) {
    constexpr u32 SIGNS = 0x80808080u;
    const Codebook entries = {{table.word[0] ^ SIGNS, table.word[1] ^ SIGNS, table.word[2] ^ SIGNS, table.word[3] ^ SIGNS}};
    const CodebookBytes both = CodebookBytes::of(entries, kt.codes0.word[quad / 2]);
    return prmt(both.low, both.high, quad % 2 == 0 ? 0x6420u : 0x7531u);
}
