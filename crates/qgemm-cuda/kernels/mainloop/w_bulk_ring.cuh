// Ring of W pieces of one warp.
// A piece is some contiguous k-tiles of a row
// tile, one bulk copy.
// The warp issues its copies itself and waits for no other warp.
// Long copies have a higher throughput.
#pragma once
#include "atoms/bulk_stream.cuh"
#include "atoms/mbarrier.cuh"
#include "mainloop/cache_line.cuh"
#include "sched/row_tile_range.cuh"

constexpr u32 WARPS = QG_THREADS / 32, PIECES = 2;

// Partition of row tiles into pieces.
struct Pieces {
    // K-tiles per piece (the last may be shorter), pieces per row
    // tile, byte stride of pieces.
    u32 k_tiles, count, pitch;

    // Fewest pieces of similar length such that PIECES per
    // warp fit in `bytes`.
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
    // Next piece: row tile in the range, and number in the row tile.
    u32 row_tile, number;
    // Tile of rows of this row tile, and its expert's weights.
    u32 tile;
    const u8* w;
    // Pieces requested so far.
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

    // Shared address of piece `number`, whose global
    // address is `from`.
    QG_DEVICE u8* piece(const WBulkRing& ring, u32 number, const u8* from) {
        return ring.pieces + number % PIECES * ring.pitch + reinterpret_cast<u64>(from) % LINE_BYTES;
    }

    // Starts the next copy, if any.
    // It replaces the piece PIECES before, which all
    // lanes must have read.
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

    // Global address of an expert's row tile.
    QG_DEVICE const u8* row_tile_of(const GemmParams& p, const u8* w, u32 row_tile) {
        return w + (u64)row_tile * p.shape.k_tiles * QG_K_TILE_BYTES;
    }

    QG_DEVICE const u8* weights_of(const GemmParams& p, const OwnRows& own) {
        return reinterpret_cast<const u8*>(p.at.w) + own.expert * p.groups.w_bytes;
    }
};
