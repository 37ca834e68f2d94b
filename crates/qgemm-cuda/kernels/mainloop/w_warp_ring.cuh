// Ring of W k-tiles of one warp, filled by cp.async:
// many bytes in flight without registers.
#pragma once
#include "atoms/cp_async.cuh"
#include "atoms/opaque_register.cuh"
#include "mainloop/row_tiles.cuh"

// One k-tile of each of the warp's row tiles.
struct WKTiles {
    alignas(16) u8 tile[ROW_TILES][QG_K_TILE_BYTES];
};

struct WWarpRing {
    WKTiles k_tiles[QG_STAGES];
};

// 16-byte chunks of a k-tile.
constexpr u32 K_TILE_CHUNKS = QG_K_TILE_BYTES / 16;

// The lane's global address in the next k-tiles, and its
// shared address in stage 0.
// They stay in registers: recomputation per k-tile would be a
// large part of the loop.
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

    // Starts the copies to stage `stage`, and advances by
    // `k_tiles` k-tiles.
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
