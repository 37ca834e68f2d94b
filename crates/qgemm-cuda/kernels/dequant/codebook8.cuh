// Codebook of eight: 3-bit codes, in planes of
// two bits and one, into signed bytes.
#pragma once
#include "dequant/k_tile.cuh"

// Table entries 4i..4i+3, each plus 128, as
// bytes of a word.
struct Codebook8 {
    u32 word[2];
};

// Table entries of quad `quad`, in the order
// of its bytes.
QG_DEVICE u32 codebook8_entries(const Codebook8& table, const KTile& kt, u32 quad) {
    using Low = KTile::Codes0;
    using High = KTile::Codes1;
    static_assert(Low::BITS == 2 && High::BITS == 1, "codes have three bits");
    const u32 low = Low::word_of(kt.codes0, quad) >> Low::shift(quad, 0) & 0x03030303u;
    const u32 high = High::word_of(kt.codes1, quad), from = High::shift(quad, 0);
    const u32 codes = and_or(from >= 2 ? high >> (from - 2) : high << (2 - from), 0x04040404u, low);
    // A prmt selector has a nibble for each byte.
    const u32 pairs = codes | codes >> 4;
    return prmt(table.word[0], table.word[1], prmt(pairs, 0, 0x4420u));
}

// Pair `pair` of quad `quad` in f16.
QG_DEVICE u32 codebook_pair_f16(const Codebook8& table, const KTile& kt, u32 quad, u32 pair) {
    const u32 entries = codebook8_entries(table, kt, quad);
    return sub_f16x2(and_or(entries >> 8 * pair, 0x00ff00ffu, 0x64006400u), 0x64806480u);
}

// The four entries of quad `quad` as signed
// bytes, in code order.
QG_DEVICE u32 codebook_signed_bytes(const Codebook8& table, const KTile& kt, u32 quad) {
    constexpr u32 SIGNS = 0x80808080u;
    return codebook8_entries({{table.word[0] ^ SIGNS, table.word[1] ^ SIGNS}}, kt, quad);
}
