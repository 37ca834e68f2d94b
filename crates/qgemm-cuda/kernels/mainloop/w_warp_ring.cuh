// Slabs of W on their way to one warp: a ring that the warp fills for itself, with asynchronous copies, so that many bytes
// are on their way that take no registers.
#pragma once
#include "atoms/cp_async.cuh"
#include "atoms/opaque_register.cuh"
#include "mainloop/row_tiles.cuh"

// One slab of each of the warp's tiles of rows.
struct WKTiles {
    alignas(16) u8 tile[ROW_TILES][QG_K_TILE_BYTES];
};

struct WWarpRing {
    WKTiles k_tiles[QG_STAGES];
};

// 16-byte units of a slab.
constexpr u32 K_TILE_CHUNKS = QG_K_TILE_BYTES / 16;

// Where a lane's part of the next slabs lies, and where it goes to in the first slabs of the ring. Addresses are kept, not found
// anew from the lane's number for every slab: with those of X that took a third of the loop's instructions.
struct WSource {
    const u8* tile[ROW_TILES];
    u32 target;

    QG_DEVICE WSource of(const GemmParams& p, const WWarpRing& ring, u32 first_tile, u32 k_tile, u32 lane) {
        WSource w;
#pragma unroll
        for (u32 rt = 0; rt < ROW_TILES; rt++) w.tile[rt] = row_tile(p, first_tile + rt, k_tile) + lane * 16;
        w.target = opaque_register(shared_address(ring.k_tiles[0].tile[0] + lane * 16));
        return w;
    }

    // Starts copying to place `stage` of the ring, and goes on by `k_tiles` slabs.
    QG_DEVICE void copy(WSource& w, u32 stage, u32 k_tiles, u32 lane) {
        const u32 target = w.target + stage * sizeof(WKTiles);
#pragma unroll
        for (u32 rt = 0; rt < ROW_TILES; rt++) {
#pragma unroll
            for (u32 i = 0; i < K_TILE_CHUNKS; i += 32)
                if (i + 32 <= K_TILE_CHUNKS || i + lane < K_TILE_CHUNKS)
                    cp_async_16_stream(target + rt * QG_K_TILE_BYTES + i * 16, w.tile[rt] + i * 16);
            w.tile[rt] += k_tiles * QG_K_TILE_BYTES;
        }
    }
};
