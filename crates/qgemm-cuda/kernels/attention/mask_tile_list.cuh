// Tile lists of masked attention: the K tiles that a row
// tile of ROWS queries attends to.
// `entry/attention_list_tiles.cu` writes a list; kernels
// walk it from the last tile to the first. A list is a
// count, then the first key of each tile, plus MIXED_TILE
// if some query does not attend to all keys of the tile.
#pragma once
#include "attention/mask.cuh"

#if QG_BITS

// Kernel parameter of kernels that write or read tile lists.
struct ListedParams : KernelParams {
    // Stride between lists, in words.
    u32 list_words;
};

// Flag in bit 0, which is free:
// tiles begin at multiples of 32.
constexpr u32 MIXED_TILE = 1;
static_assert(QG_KEYS % 32 == 0, "tiles are whole words of a mask");

// List of a row tile of a sequence.
// Heads that share a mask share lists.
QG_DEVICE u8* tile_list(const ListedParams& p, const Sequence& s, u32 head, u32 row_tile) {
    const u64 first = p.bits.head_words == 0 ? 0 : (u64)head * p.shape.sequences;
    const u64 list = (first + s.index) * p.at.row_ctas + row_tile;
    return reinterpret_cast<u8*>(p.at.workspace) + list * p.list_words * 4;
}

#endif
