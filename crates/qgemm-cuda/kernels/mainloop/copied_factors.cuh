// Copies of `matmul` operands that are contiguous along K,
// whatever the source order.
// A CTA handles TILE × TILE values of one matrix of A or B.
#pragma once
#include "atoms/memory.cuh"

constexpr u32 TILE = QG_TILE;

// An operand: its matrices and their copies.
// Strides count elements.
struct CopiedFactor {
    u64 from, to;
    // Strides of source lines (the contiguous dimension) and of
    // source matrices.
    u64 from_line, from_matrix;
    // Strides of copy rows (values along K), a multiple of
    // 32 bytes, and of copies.
    u64 to_row, to_matrix;
    u32 outer, k;
    // Tiles along K, per matrix, and in all matrices.
    u32 k_tiles, matrix_tiles, tiles;
    // Whether the source is contiguous along K, and whether its
    // lines are 16-byte aligned.
    u32 along_k, aligned16;
    u32 padding;
};

struct CopyParams {
    CopiedFactor factor[2];
};
static_assert(sizeof(CopyParams) == 160, "the host lays out another size");
