// Lists of the tiles of QG_KEYS keys of which rows of ROWS queries see some, by a mask of bits: `entry/attention_list_tiles.cu` writes them, and
// kernels go through them from the last tile to the first. A list is how many there are, then the first key of each, and one more where not
// every query sees all of its keys.
#pragma once
#include "mainloop/attention_bits.cuh"

#ifdef QG_BITS

// The parameter of kernels that write or read lists.
struct ListedParams : KernelParams {
    // Words from one list to the next.
    u32 list_words;
};

// Tiles begin at even keys.
constexpr u32 MIXED_TILE = 1;
static_assert(QG_KEYS % 32 == 0, "tiles are whole words of a mask");

// The list of row tile `row_tile` of a sequence. Heads that share a mask share lists.
QG_DEVICE u8* tile_list(const ListedParams& p, const Sequence& s, u32 head, u32 row_tile) {
    const u64 first = p.bits.head_words == 0 ? 0 : (u64)head * p.shape.sequences;
    const u64 list = (first + s.index) * p.at.row_ctas + row_tile;
    return reinterpret_cast<u8*>(p.at.workspace) + list * p.list_words * 4;
}

#endif
