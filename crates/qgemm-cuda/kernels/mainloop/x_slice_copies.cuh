// Shared-memory copy of a warp's columns of X.
// K-blocks of 64 have the order of `XStage`.
// Columns past K and rows past M are zero.
#pragma once
#include "atoms/cp_async.cuh"
#include "mainloop/x_ring.cuh"

// All lanes start the copies of k-blocks from `first` on.
QG_DEVICE void copy_x_slice(XStage* to, const GemmParams& p, u32 first, u32 k_blocks, u32 lane) {
    const u8* const x = reinterpret_cast<const u8*>(p.at.x);
#pragma unroll 4
    for (u32 i = lane; i < k_blocks * QG_X_ROWS * X_ROW_CHUNKS; i += 32) {
        const u32 chunk = i % X_ROW_CHUNKS, token = i / X_ROW_CHUNKS % QG_X_ROWS, k_block = i / (X_ROW_CHUNKS * QG_X_ROWS);
        const u32 column = (first + k_block) * K_BLOCK + chunk * X_CHUNK_K;
        const u32 inside = token < p.shape.m && column < p.shape.k ? (p.shape.k - column) * 2 : 0;
        const u32 bytes = inside < X_CHUNK_BYTES ? inside : X_CHUNK_BYTES;
        const u8* const from = x + ((u64)token * p.at.x_row + column) * 2;
        cp_async_16(shared_address(XStage::at(to[k_block], token, chunk)), bytes == 0 ? x : from, bytes);
    }
}
