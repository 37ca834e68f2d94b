// Copies all columns of X, for a tile of rows, to shared memory.
// K-blocks of 64 have the order of `XStage`.
// Columns past K and missing rows are zero.
#pragma once
#include "atoms/cp_async.cuh"
#include "mainloop/x_ring.cuh"
#include "sched/rows.cuh"

// Rows of D of a tile's tokens.
struct TileTokens {
    static constexpr u32 NONE = ~0u;
    u32 row[QG_TILE_M];
};

// Threads that copy a k-block of all rows.
constexpr u32 K_BLOCK_THREADS = QG_TILE_M * X_ROW_CHUNKS;
static_assert(QG_THREADS % K_BLOCK_THREADS == 0, "a thread copies of one row");

// All threads of the CTA start the copies of the rows of `p`
// and record the rows of D.
QG_DEVICE void copy_x_tile(XStage* to, TileTokens& tokens, const GemmParams& p, u32 k_blocks, u32 thread) {
    const u32 token = thread / X_ROW_CHUNKS % QG_TILE_M, chunk = thread % X_ROW_CHUNKS;
    u32 row, x_row;
    const bool has_row = find_row(p, token, row);
    find_x_row(p, token, x_row);
    if (thread < K_BLOCK_THREADS && chunk == 0) st_shared(&tokens.row[token], has_row ? row : TileTokens::NONE);
    const u8* const from = reinterpret_cast<const u8*>(p.at.x) + (u64)(has_row ? x_row : 0) * p.at.x_row * 2;
    for (u32 k_block = thread / K_BLOCK_THREADS; k_block < k_blocks; k_block += QG_THREADS / K_BLOCK_THREADS) {
        const u32 column = k_block * K_BLOCK + chunk * X_CHUNK_K;
        const u32 inside = has_row && column < p.shape.k ? (p.shape.k - column) * 2 : 0;
        const u32 bytes = inside < X_CHUNK_BYTES ? inside : X_CHUNK_BYTES;
        cp_async_16(shared_address(XStage::at(to[k_block], token, chunk)), bytes == 0 ? from : from + column * 2, bytes);
    }
}
