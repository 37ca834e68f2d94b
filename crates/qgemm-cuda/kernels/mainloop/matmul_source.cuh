// Global loads of `matmul` operands, at least 16 bytes each.
// A tile type defines OUTER (rows of A or columns of B), CHUNK
// (contiguous elements in shared memory) and the byte offset
// `at` of a chunk.
// Global elements have the size of the stored type.
// The including main loop defines TileA and TileB.
#pragma once
#include "sched/matmul_tile.cuh"

// A thread's copies of each tile of an operand.
// Chunks have fixed positions in the tile.
template <class Tile, bool ALONG_K, u32 STORED_BYTES>
struct ChunkSource {
    static constexpr u32 ELEMENT_BYTES = STORED_BYTES, TILE_BYTES = Tile::BYTES;
    static constexpr u32 CHUNK = Tile::CHUNK * STORED_BYTES < 16 ? 16 / STORED_BYTES : Tile::CHUNK;
    static constexpr u32 COUNT = Tile::OUTER * QG_TILE_K / CHUNK / QG_THREADS;
    static_assert(COUNT * QG_THREADS * CHUNK == Tile::OUTER * QG_TILE_K, "threads copy the same number of chunks");

    const u8* first;
    const u8* from[COUNT];
    u64 step_bytes;
    u32 outer_left[COUNT], k[COUNT], k_len;

    // Position of chunk `i` in copy order;
    // neighbours are contiguous.
    QG_DEVICE void place(u32 i, u32& outer, u32& k) {
        outer = ALONG_K ? i / (QG_TILE_K / CHUNK) : i % (Tile::OUTER / CHUNK) * CHUNK;
        k = ALONG_K ? i % (QG_TILE_K / CHUNK) * CHUNK : i / (Tile::OUTER / CHUNK);
    }

    QG_DEVICE ChunkSource of(const u8* matrix, u64 stride, u32 outer_begin, u32 outer_len, u32 k_begin, u32 k_len,
                             u32 thread) {
        ChunkSource s;
        s.first = matrix;
        s.k_len = k_len;
        s.step_bytes = (ALONG_K ? (u64)QG_TILE_K : QG_TILE_K * stride) * ELEMENT_BYTES;
#pragma unroll
        for (u32 i = 0; i < COUNT; i++) {
            u32 outer, k;
            place(thread + i * QG_THREADS, outer, k);
            outer += outer_begin, k += k_begin;
            s.k[i] = k;
            s.outer_left[i] = outer < outer_len ? outer_len - outer : 0;
            s.from[i] = matrix + (ALONG_K ? outer * stride + k : k * stride + outer) * ELEMENT_BYTES;
        }
        return s;
    }

    // Elements of chunk `i` inside the matrix.
    QG_DEVICE u32 elements(const ChunkSource& s, u32 i) {
        if (s.outer_left[i] == 0 || s.k[i] >= s.k_len) return 0;
        const u32 left = ALONG_K ? s.k_len - s.k[i] : s.outer_left[i];
        return left < CHUNK ? left : CHUNK;
    }

    // Advances to the next tile along K.
    QG_DEVICE void advance(ChunkSource& s) {
#pragma unroll
        for (u32 i = 0; i < COUNT; i++) {
            s.from[i] += s.step_bytes;
            s.k[i] += QG_TILE_K;
        }
    }

    // For a chunk of two tile chunks: whether the thread
    // stores the upper half first, so that eight threads use
    // different banks.
    QG_DEVICE bool begins_with_upper(u32 i) {
        return !ALONG_K && Tile::OUTER / CHUNK > 4 && i / 4 % 2 == 1;
    }

    // Byte offset in the tile of chunk `i`, from element `first` on.
    QG_DEVICE u32 to(u32 i, u32 thread, u32 first = 0) {
        u32 outer, k;
        place(thread + i * QG_THREADS, outer, k);
        return Tile::at(ALONG_K ? outer : outer + first, ALONG_K ? k + first : k);
    }
};

using SourceA = ChunkSource<TileA, QG_A_ALONG_K, QG_A_BYTES>;
using SourceB = ChunkSource<TileB, QG_B_ALONG_K, QG_B_BYTES>;

QG_DEVICE SourceA source_a(const MatmulParams& p, const MatmulTile& t, u32 thread) {
    const u8* matrix = reinterpret_cast<const u8*>(p.at.a) + (t.product * p.at.a_batch + t.k_first * p.at.a_col) * SourceA::ELEMENT_BYTES;
    return SourceA::of(matrix, QG_A_ALONG_K ? p.at.a_row : p.at.a_col, t.row, p.shape.m, t.begin * QG_TILE_K, t.k_len,
                       thread);
}
QG_DEVICE SourceB source_b(const MatmulParams& p, const MatmulTile& t, u32 thread) {
    const u8* matrix = reinterpret_cast<const u8*>(p.at.b) + (t.product * p.at.b_batch + t.k_first * p.at.b_row) * SourceB::ELEMENT_BYTES;
    return SourceB::of(matrix, QG_B_ALONG_K ? p.at.b_col : p.at.b_row, t.column, p.shape.n, t.begin * QG_TILE_K,
                       t.k_len, thread);
}
