// Slabs of W on their way to one warp: a ring that the warp fills for itself, with asynchronous copies, so that many bytes
// are on their way that take no registers.
#pragma once
#include "atoms/cp_async.cuh"
#include "atoms/opaque_register.cuh"
#include "mainloop/row_tiles.cuh"

// One slab of each of the warp's tiles of rows.
struct WSlabs {
    alignas(16) u8 tile[ROW_TILES][QG_K_TILE_BYTES];
};

struct WWarpRing {
    WSlabs slabs[QG_STAGES];
};

// 16-byte units of a slab.
constexpr u32 SLAB_UNITS = QG_K_TILE_BYTES / 16;

// Where a lane's part of the next slabs lies, and where it goes to in the first slabs of the ring. Addresses are kept, not found
// anew from the lane's number for every slab: with those of X that took a third of the loop's instructions.
struct WSource {
    const u8* tile[ROW_TILES];
    u32 target;

    QG_DEVICE WSource of(const GemmParams& p, const WWarpRing& ring, u32 first_tile, u32 slab, u32 lane) {
        WSource w;
#pragma unroll
        for (u32 rt = 0; rt < ROW_TILES; rt++) w.tile[rt] = row_tile(p, first_tile + rt, slab) + lane * 16;
        w.target = kept(shared_address(ring.slabs[0].tile[0] + lane * 16));
        return w;
    }

    // Starts copying to place `stage` of the ring, and goes on by `slabs` slabs.
    QG_DEVICE void copy(WSource& w, u32 stage, u32 slabs, u32 lane) {
        const u32 target = w.target + stage * sizeof(WSlabs);
#pragma unroll
        for (u32 rt = 0; rt < ROW_TILES; rt++) {
#pragma unroll
            for (u32 i = 0; i < SLAB_UNITS; i += 32)
                if (i + 32 <= SLAB_UNITS || i + lane < SLAB_UNITS)
                    cp_async_16_stream(target + rt * QG_K_TILE_BYTES + i * 16, w.tile[rt] + i * 16);
            w.tile[rt] += slabs * QG_K_TILE_BYTES;
        }
    }
};
