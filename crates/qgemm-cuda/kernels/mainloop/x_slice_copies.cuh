// The columns of X of a slice of K in shared memory, as k-blocks of 64 in the order of `XStage`. Those that X does not have, and rows beyond the
// last, are zeros. The warps that have the slice, one a team, share the copies.
#pragma once
#include "atoms/cp_async.cuh"
#include "mainloop/x_ring.cuh"
#include "sched/k_slice.cuh"

// For all lanes of a warp: starts copying k-blocks from `first` on.
QG_DEVICE void copy_x_slice(XStage* to, const GemmParams& p, u32 first, u32 k_blocks, u32 team, u32 lane) {
    const u8* const x = reinterpret_cast<const u8*>(p.at.x);
#pragma unroll 4
    for (u32 i = team * 32 + lane; i < k_blocks * QG_X_ROWS * X_ROW_CHUNKS; i += TEAMS * 32) {
        const u32 chunk = i % X_ROW_CHUNKS, token = i / X_ROW_CHUNKS % QG_X_ROWS, k_block = i / (X_ROW_CHUNKS * QG_X_ROWS);
        const u32 column = (first + k_block) * K_BLOCK + chunk * X_CHUNK_K;
        const u32 inside = token < p.shape.m && column < p.shape.k ? (p.shape.k - column) * 2 : 0;
        const u32 bytes = inside < X_CHUNK_BYTES ? inside : X_CHUNK_BYTES;
        const u8* const from = x + ((u64)token * p.at.x_row + column) * 2;
        cp_async_16(shared_address(XStage::at(to[k_block], token, chunk)), bytes == 0 ? x : from, bytes);
    }
    cp_async_commit_group();
}

// Of the warps that have a slice: where that is one, no other is waited for.
QG_DEVICE void x_slice_barrier() {
    if constexpr (TEAMS == 1)
        warp_barrier();
    else
        cta_barrier();
}

QG_DEVICE void wait_for_x_slice() {
    cp_async_wait_group<0>();
    x_slice_barrier();
}
