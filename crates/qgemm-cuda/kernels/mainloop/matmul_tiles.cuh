// Shared-memory tiles of `matmul` for 16-bit MMA operands.
// Tiles keep the order of the matrix; `ldmatrix` transposes on
// the way to registers.
//
// A matrix contiguous along K has [outer][k] tiles,
// else [k][outer].
// `outer` is a row of A or a column of B.
// 16-byte chunks are swizzled: the eight chunks of an 8×8
// matrix use different banks.
#pragma once
#include "atoms/ldmatrix.cuh"
#include "atoms/memory.cuh"
#include "mainloop/matmul_accumulators.cuh"
#include "sched/matmul_tile.cuh"

constexpr u32 CHUNK = 8, CHUNK_BYTES = 16;
constexpr u32 K_CHUNKS = QG_TILE_K / CHUNK;
constexpr u32 K_STEPS = QG_TILE_K / 16;
static_assert(K_CHUNKS == 4, "a row along K is half of the banks");

template <u32 TILE, bool ALONG_K>
struct TileLayout {
    static constexpr u32 OUTER = TILE, CHUNK = ::CHUNK;
    static constexpr u32 BYTES = TILE * QG_TILE_K * 2;

    // Byte offset of the chunk whose first element is (outer, k).
    QG_DEVICE u32 at(u32 outer, u32 k) {
        if constexpr (ALONG_K) return (outer * K_CHUNKS + (k / CHUNK ^ (outer / 2 % 4))) * CHUNK_BYTES;
        return (k * (TILE / CHUNK) + (outer / CHUNK ^ (k % 8))) * CHUNK_BYTES;
    }
};

using TileA = TileLayout<QG_TILE_M, QG_A_ALONG_K>;
using TileB = TileLayout<QG_TILE_N, QG_B_ALONG_K>;

#include "mainloop/matmul_source.cuh"

static_assert(N_TILES % 2 == 0, "B is loaded for two tiles at once");

// A registers 0..3: (row, k) +(0, 0), +(8, 0), +(0, 8), +(8, 8).
QG_DEVICE void load_a(u32 (&a)[4], const u8* tile, u32 row, u32 k, u32 lane) {
    if constexpr (QG_A_ALONG_K)
        ldmatrix_x4(a, tile + TileA::at(row + lane % 16, k + lane / 16 * 8));
    else
        ldmatrix_x4_trans(a, tile + TileA::at(row + lane / 8 % 2 * 8, k + lane / 16 * 8 + lane % 8));
}

// Registers 0, 1: B's first eight columns; 2, 3: the next eight.
QG_DEVICE void load_b(u32 (&b)[4], const u8* tile, u32 column, u32 k, u32 lane) {
    if constexpr (QG_B_ALONG_K)
        ldmatrix_x4(b, tile + TileB::at(column + lane / 16 * 8 + lane % 8, k + lane / 8 % 2 * 8));
    else
        ldmatrix_x4_trans(b, tile + TileB::at(column + lane / 16 * 8, k + lane / 8 % 2 * 8 + lane % 8));
}
