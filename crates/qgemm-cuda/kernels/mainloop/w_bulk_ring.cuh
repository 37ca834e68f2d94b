// A ring of one warp's pieces of row tiles of W: a piece is some k-tiles that follow one another in memory, and is one bulk copy. The warp
// asks for its pieces itself, and waits for no other. Long copies come faster than short ones (109 experts of 2048x768 in INT4, no
// arithmetic, on an H200: 20.0 us in pieces of 6.5 KB, 21.4 and 23.1 in those of 3.2 and 1.1).
#pragma once
#include "atoms/bulk_stream.cuh"
#include "atoms/mbarrier.cuh"
#include "mainloop/cache_line.cuh"
#include "sched/row_tile_range.cuh"

constexpr u32 WARPS = QG_THREADS / 32, PIECES = 2;

// How row tiles are cut.
struct Pieces {
    // K-tiles of a piece, but for the last of a row tile; pieces of a row tile; bytes from a piece to the next.
    u32 k_tiles, count, pitch;

    // The fewest, all about as long, of which each warp has room for PIECES in so many bytes of all of them.
    QG_DEVICE Pieces in_bytes(u32 k_tiles, u32 bytes) {
        const u32 pitch = bytes / (WARPS * PIECES) / LINE_BYTES * LINE_BYTES, most = (pitch - LINE_BYTES) / QG_K_TILE_BYTES;
        const u32 count = (k_tiles + most - 1) / most, each = (k_tiles + count - 1) / count;
        return {each, (k_tiles + each - 1) / each, pitch};
    }
};

struct WBulkRing {
    u8* pieces;
    u32 pitch;
    u64* full;
    // The next piece to ask for: of the warp's row tiles, as the range counts them, and its number there.
    u32 row_tile, number;
    // The tile of rows of that row tile, and where its expert's weights begin.
    u32 tile;
    const u8* w;
    // Pieces asked for.
    u32 asked;

    // `own` is the range's first tile of rows.
    QG_DEVICE WBulkRing of_warp(u8* pieces, u64* full, const GemmParams& p, const RowTileRange& range, const Pieces& cut, u32 warp, const OwnRows& own) {
        WBulkRing ring;
        ring.pitch = cut.pitch;
        ring.pieces = pieces + warp * PIECES * ring.pitch;
        ring.full = full;
        ring.row_tile = range.first + warp, ring.number = 0;
        ring.tile = 0, ring.w = weights_of(p, own);
        ring.asked = 0;
        return ring;
    }

    // Where piece number `number` is, which is at `from` in memory.
    QG_DEVICE u8* piece(const WBulkRing& ring, u32 number, const u8* from) {
        return ring.pieces + number % PIECES * ring.pitch + reinterpret_cast<u64>(from) % LINE_BYTES;
    }

    // Asks for the next piece, where there is one, in the place of the one asked for PIECES before, which all lanes have read.
    QG_DEVICE void ask(WBulkRing& ring, const GemmParams& p, const RowTileIndex& index, const ExpertWords& words, const RowTileRange& range,
                       const Pieces& cut, u64 policy, u32 lane) {
        if (ring.row_tile >= range.end) return;
        if (ring.row_tile >= (ring.tile + 1) * range.row_tiles) {
            ring.tile = ring.row_tile / range.row_tiles;
            ring.w = weights_of(p, RowTileIndex::find(index, words, p.groups, range.first_place + ring.tile));
        }
        const u32 first = ring.number * cut.k_tiles, left = p.shape.k_tiles - first;
        const u32 bytes = (left < cut.k_tiles ? left : cut.k_tiles) * QG_K_TILE_BYTES;
        if (lane == 0) {
            const u8* const from = row_tile_of(p, ring.w, ring.row_tile - ring.tile * range.row_tiles) + first * QG_K_TILE_BYTES;
            u64* const full = ring.full + ring.asked % PIECES;
            mbarrier_arrive_expect_tx(full, bytes);
            cp_async_bulk_stream(piece(ring, ring.asked, from), from, bytes, full, policy);
        }
        ring.asked++;
        if (++ring.number == cut.count) ring.number = 0, ring.row_tile += WARPS;
    }

    // Where a row tile of an expert begins in memory.
    QG_DEVICE const u8* row_tile_of(const GemmParams& p, const u8* w, u32 row_tile) {
        return w + (u64)row_tile * p.shape.k_tiles * QG_K_TILE_BYTES;
    }

    QG_DEVICE const u8* weights_of(const GemmParams& p, const OwnRows& own) {
        return reinterpret_cast<const u8*>(p.at.w) + own.expert * p.groups.w_bytes;
    }
};
