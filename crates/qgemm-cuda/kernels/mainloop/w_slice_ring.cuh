// Ring of W pieces of one warp, which has one K slice of each
// row tile of its CTA.
// A piece is some contiguous k-tiles, one bulk copy.
// The warp issues its copies itself and waits for no other warp.
#pragma once
#include "atoms/bulk_stream.cuh"
#include "atoms/launch.cuh"
#include "atoms/mbarrier.cuh"
#include "mainloop/cache_line.cuh"
#include "sched/params.cuh"

constexpr u32 WARPS = QG_THREADS / 32;

// Pieces per ring, and their approximate size.
constexpr u32 PIECES = 2, PIECE_BYTES = 8448;
// Pieces of whole lines are stored without gaps.
// Gaps would change the line alignment and slow the copies.
constexpr bool ARE_WHOLE_LINES = QG_K_TILE_BYTES % LINE_BYTES == 0;

// A warp's k-tiles of a row tile.
struct KSlice {
    u32 first, k_tiles;

    QG_DEVICE KSlice of_warp(u32 k_tiles, u32 warp) {
        const u32 first = warp * k_tiles / WARPS;
        return {first, (warp + 1) * k_tiles / WARPS - first};
    }
};

struct WSliceRing {
    u8* memory;
    u64* full;
    // K-tiles per piece (the last may be shorter), and byte
    // stride of pieces.
    u32 piece_k_tiles, pitch;
    // Next piece: its row tile, and its first k-tile in the slice.
    u32 n_tile, k_tile;
    // Start of the slice in W's first row tile, and k-tiles of the
    // slice and of a row tile.
    const u8* w;
    u32 slice_k_tiles, k_tiles;
    // Pieces requested and consumed.
    u32 asked, taken;

    // Memory from `begin` to `end` holds the rings of all warps.
    QG_DEVICE WSliceRing of_warp(u8* begin, const u8* end, u64* full, const GemmParams& p, const KSlice& slice, u32 warp) {
        WSliceRing ring;
        // Sized for the longest slice: all warps have equal pieces.
        const u32 most = (p.shape.k_tiles + WARPS - 1) / WARPS, space = (u32)(end - begin) / (WARPS * PIECES);
        const u32 room = (ARE_WHOLE_LINES ? space : space / LINE_BYTES * LINE_BYTES - LINE_BYTES) / QG_K_TILE_BYTES;
        const u32 wanted = PIECE_BYTES / QG_K_TILE_BYTES, longest = room < wanted ? room : wanted;
        const u32 count = (most + longest - 1) / longest;
        ring.piece_k_tiles = (most + count - 1) / count;
        ring.pitch = ARE_WHOLE_LINES ? ring.piece_k_tiles * QG_K_TILE_BYTES : space / LINE_BYTES * LINE_BYTES;
        ring.memory = begin + warp * PIECES * ring.pitch;
        ring.full = full;
        ring.n_tile = cta_index().x, ring.k_tile = 0;
        ring.w = reinterpret_cast<const u8*>(p.at.w) + (u64)slice.first * QG_K_TILE_BYTES;
        ring.slice_k_tiles = slice.k_tiles, ring.k_tiles = p.shape.k_tiles;
        ring.asked = ring.taken = 0;
        return ring;
    }

    QG_DEVICE void init(const WSliceRing& ring) {
#pragma unroll
        for (u32 i = 0; i < PIECES; i++) mbarrier_init(&ring.full[i], 1);
        fence_mbarrier_init();
    }

    // Starts the next copy, if any.
    // It replaces a piece that all lanes must have read.
    QG_DEVICE void ask(WSliceRing& ring, u32 n_tiles, u64 policy, u32 lane) {
        if (ring.n_tile >= n_tiles || ring.slice_k_tiles == 0) return;
        const u32 left = ring.slice_k_tiles - ring.k_tile, count = left < ring.piece_k_tiles ? left : ring.piece_k_tiles;
        if (lane == 0) {
            const u8* const from = ring.w + ((u64)ring.n_tile * ring.k_tiles + ring.k_tile) * QG_K_TILE_BYTES;
            u64* const full = &ring.full[ring.asked % PIECES];
            mbarrier_arrive_expect_tx(full, count * QG_K_TILE_BYTES);
            cp_async_bulk_stream(piece(ring, ring.asked, (u32)reinterpret_cast<u64>(from)), from, count * QG_K_TILE_BYTES, full, policy);
        }
        ring.asked++;
        ring.k_tile += count;
        if (ring.k_tile == ring.slice_k_tiles) ring.k_tile = 0, ring.n_tile += grid_ctas().x;
    }

    // Waits for the next piece.
    // It starts at k-tile `k_tile` of the slice in
    // row tile `n_tile`.
    QG_DEVICE const u8* take(WSliceRing& ring, u32 n_tile, u32 k_tile) {
        mbarrier_wait(&ring.full[ring.taken % PIECES], ring.taken / PIECES % 2);
        const u32 from = (u32)reinterpret_cast<u64>(ring.w) + (n_tile * ring.k_tiles + k_tile) * QG_K_TILE_BYTES;
        return piece(ring, ring.taken++, from);
    }

    // Shared address of piece `number`.
    // `from` is the lower half of its global address.
    QG_DEVICE u8* piece(const WSliceRing& ring, u32 number, u32 from) {
        return ring.memory + number % PIECES * ring.pitch + (ARE_WHOLE_LINES ? 0 : from % LINE_BYTES);
    }
};
