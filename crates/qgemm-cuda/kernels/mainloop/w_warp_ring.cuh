// Slabs of W on their way to one warp: a ring that the warp fills for itself, with asynchronous copies, so that many bytes
// are on their way that take no registers.
#pragma once
#include "atoms/cp_async.cuh"
#include "mainloop/row_tiles.cuh"

// One slab of each of the warp's tiles of rows.
struct WSlabs {
    alignas(16) u8 tile[ROW_TILES][QG_SLAB_BYTES];
};

struct WWarpRing {
    WSlabs slabs[QG_STAGES];
};

// 16-byte units of a slab.
constexpr u32 SLAB_UNITS = QG_SLAB_BYTES / 16;

// Where a lane's part of the next slabs lies.
struct WSource {
    const u8* tile[ROW_TILES];

    QG_DEVICE WSource of(const GemmParams& p, u32 first_tile, u32 slab, u32 lane) {
        WSource w;
#pragma unroll
        for (u32 rt = 0; rt < ROW_TILES; rt++) w.tile[rt] = row_tile(p, first_tile + rt, slab) + lane * 16;
        return w;
    }

    // Starts copying, and goes on by `slabs` slabs.
    QG_DEVICE void copy(WSource& w, WSlabs& to, u32 slabs, bool present, u32 lane) {
        if (!present) return;
#pragma unroll
        for (u32 rt = 0; rt < ROW_TILES; rt++) {
            u8* target = to.tile[rt] + lane * 16;
#pragma unroll
            for (u32 i = 0; i < SLAB_UNITS; i += 32)
                if (i + 32 <= SLAB_UNITS || i + lane < SLAB_UNITS) cp_async_16_stream(target + i * 16, w.tile[rt] + i * 16);
            w.tile[rt] += slabs * QG_SLAB_BYTES;
        }
    }
};
