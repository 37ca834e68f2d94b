// f32 `matmul` on FMA. Tiles are [k][row] and [k][column] in
// shared memory; threads load four rows or columns at once.
#pragma once
#include "atoms/cp_async.cuh"
#include "atoms/memory.cuh"
#include "atoms/numeric.cuh"
#include "sched/matmul_tile.cuh"

// Threads form a 16 × 16 grid.
constexpr u32 THREADS_ACROSS = 16, FOUR = 4;
constexpr u32 THREAD_ROWS = QG_TILE_M / THREADS_ACROSS, THREAD_COLUMNS = QG_TILE_N / THREADS_ACROSS;
constexpr u32 ACCUMULATORS = THREAD_ROWS * THREAD_COLUMNS;
static_assert(THREADS_ACROSS * THREADS_ACROSS == QG_THREADS, "threads share the tile");

// Rows or columns that all threads cover with one load each.
// A thread's groups of four are FOURS apart.
constexpr u32 FOURS = THREADS_ACROSS * FOUR;

// Rows keep their order.
struct RowOffsets {
    QG_DEVICE constexpr u32 of(u32 row) {
        return row;
    }
    // Row `i` of thread `part`.
    QG_DEVICE u32 row(u32 part, u32 i) {
        return i / FOUR * FOURS + part * FOUR + i % FOUR;
    }
};

// A thread stores eight consecutive columns together.
// Their halves are FOURS apart in the tile.
struct ColumnOffsets {
    QG_DEVICE constexpr u32 of(u32 column) {
        const u32 in_both = column % (2 * FOURS);
        return column - in_both + in_both % 8 / 4 * FOURS + in_both / 8 * 4 + in_both % 4;
    }
    QG_DEVICE u32 column(u32 part, u32 run) {
        return run * 2 * FOURS + part * 8;
    }
};

// [k][position of outer].
// Values along K that threads store at once use different banks:
// by the padding, and by a rotation of each group of four.
// The rotation advances by one every eight k (by two
// for 16-k tiles).
template <u32 TILE, bool ROTATES, class Places>
struct FmaTile {
    static constexpr u32 OUTER = TILE, PITCH = TILE + 4, BYTES = QG_TILE_K * PITCH * 4;
    // Rotated position of value `i` of a group of four at `k`.
    QG_DEVICE constexpr u32 rotated(u32 i, u32 k) {
        return (i + k / 8 * (32 / QG_TILE_K)) % FOUR;
    }
    // Byte offset of (outer, k).
    QG_DEVICE constexpr u32 at(u32 outer, u32 k) {
        const u32 place = Places::of(outer);
        return (k * PITCH + place - place % FOUR + (ROTATES ? rotated(place % FOUR, k) : place % FOUR)) * 4;
    }
    // Loads the group of four at `place`.
    QG_DEVICE void load_four(float* to, const u8* tile, u32 place, u32 k) {
        const f32x4 v = ld_shared(reinterpret_cast<const f32x4*>(tile + (k * PITCH + place) * 4));
        const float four[FOUR] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (u32 i = 0; i < FOUR; i++) to[i] = four[ROTATES ? rotated(i, k) : i];
    }
};

using TileA = FmaTile<QG_TILE_M, QG_A_ALONG_K, RowOffsets>;
using TileB = FmaTile<QG_TILE_N, QG_B_ALONG_K, ColumnOffsets>;

struct FmaStage {
    alignas(16) u8 a[TileA::BYTES];  // [k][row]
    alignas(16) u8 b[TileB::BYTES];  // [k][column]
};

// A thread's copies of each tile of an operand.
// The chunks have fixed, equally spaced positions in the tile.
// A chunk is four values of an operand across K, or one value
// of an operand along K.
template <class Tile, bool ALONG_K>
struct TileCopy {
    static constexpr u32 CHUNK = ALONG_K ? 1 : FOUR;
    // Chunks side by side in memory, and chunks per thread.
    static constexpr u32 ACROSS = ALONG_K ? QG_TILE_K : Tile::OUTER / CHUNK;
    static constexpr u32 COUNT = Tile::OUTER * QG_TILE_K / CHUNK / QG_THREADS, APART = QG_THREADS / ACROSS;
    static_assert(COUNT * QG_THREADS * CHUNK == Tile::OUTER * QG_TILE_K, "threads copy the same number of chunks");
    static_assert(!ALONG_K || APART % 8 == 0, "chunks of a thread are equally far apart");

    // First chunk of the next tile, and byte strides to the
    // thread's next chunk and to the next tile.
    const u8* from;
    u64 apart, step;
    // Matrix position of the first chunk, and its byte in a tile.
    u32 outer, k, place;

    QG_DEVICE TileCopy of(const u8* matrix, u64 stride, u32 first_outer, u32 first_k, u32 thread) {
        TileCopy c;
        const u32 along = thread % ACROSS * CHUNK, across = thread / ACROSS;
        const u32 outer = ALONG_K ? across : along, k = ALONG_K ? along : across;
        c.outer = first_outer + outer, c.k = first_k + k;
        c.from = matrix + (ALONG_K ? c.outer * stride + c.k : c.k * stride + c.outer) * 4;
        c.apart = APART * stride * 4;
        c.step = QG_TILE_K * (ALONG_K ? 4 : stride * 4);
        c.place = Tile::at(outer, k);
        return c;
    }

    // Byte distance of chunk `i` from the first chunk.
    QG_DEVICE constexpr u32 after(u32 i) {
        return ALONG_K ? Tile::at(i * APART, 0) : Tile::at(0, i * APART);
    }

    QG_DEVICE void copy(u8* to, const u8* from, u32 elements) {
        if constexpr (CHUNK == FOUR)
            cp_async_16(to, from, elements * 4);
        else
            cp_async_4(to, from, elements * 4);
    }

    // Copies the next tile; all of it lies inside the matrix.
    QG_DEVICE void whole(TileCopy& c, u8* tile) {
#pragma unroll
        for (u32 i = 0; i < COUNT; i++) {
            if constexpr (CHUNK == FOUR)
                cp_async_16(shared_address(tile + c.place + after(i)), c.from + i * c.apart);
            else
                cp_async_4(tile + c.place + after(i), c.from + i * c.apart, 4);
        }
        advance(c);
    }

    // Copies the next tile, zero-filled past the matrix's end.
    QG_DEVICE void part(TileCopy& c, u8* tile, const u8* matrix, u32 outer_len, u32 k_len) {
#pragma unroll 1
        for (u32 i = 0; i < COUNT; i++) {
            const u32 outer = c.outer + (ALONG_K ? i * APART : 0), k = c.k + (ALONG_K ? 0 : i * APART);
            u32 elements = ALONG_K ? k_len - k : outer_len - outer;
            if (elements > CHUNK) elements = CHUNK;
            if (outer >= outer_len || k >= k_len) elements = 0;
            // Unread chunks still need a valid address.
            copy(tile + c.place + after(i), elements > 0 ? c.from + i * c.apart : matrix, elements);
        }
        advance(c);
    }

    QG_DEVICE void advance(TileCopy& c) {
        c.from += c.step;
        c.k += QG_TILE_K;
    }
};

using CopyA = TileCopy<TileA, QG_A_ALONG_K>;
using CopyB = TileCopy<TileB, QG_B_ALONG_K>;

// Thread position along the tile.
// 16-byte loads are twice as fast if lane pairs i, i ^ 1 or i,
// i ^ 2 load one address.
// So the lowest lane bit goes to A, the next three to B.
QG_DEVICE u32 part_of_rows(u32 thread) {
    return thread / 32 % 4 * 4 + thread / 16 % 2 * 2 + thread % 2;
}
QG_DEVICE u32 part_of_columns(u32 thread) {
    return thread / 128 * 8 + thread / 2 % 8;
}

// A thread's values of one k.
struct FmaOperands {
    float a[THREAD_ROWS], b[THREAD_COLUMNS];

    QG_DEVICE void load(FmaOperands& o, const FmaStage& stage, u32 rows, u32 columns, u32 k) {
#pragma unroll
        for (u32 i = 0; i < THREAD_ROWS; i += FOUR) TileA::load_four(&o.a[i], stage.a, i * THREADS_ACROSS + rows * FOUR, k);
#pragma unroll
        for (u32 j = 0; j < THREAD_COLUMNS; j += FOUR) TileB::load_four(&o.b[j], stage.b, j * THREADS_ACROSS + columns * FOUR, k);
    }
};

// Adds the products of a stage.
QG_DEVICE void multiply_stage(float (&acc)[ACCUMULATORS], const FmaStage& stage, u32 rows, u32 columns) {
    FmaOperands operands[2];
    FmaOperands::load(operands[0], stage, rows, columns, 0);
#pragma unroll
    for (u32 k = 0; k < QG_TILE_K; k++) {
        if (k + 1 < QG_TILE_K) FmaOperands::load(operands[(k + 1) % 2], stage, rows, columns, k + 1);
        const FmaOperands& o = operands[k % 2];
#pragma unroll
        for (u32 i = 0; i < THREAD_ROWS; i++)
#pragma unroll
            for (u32 j = 0; j < THREAD_COLUMNS; j++) {
                // Serpentine order, to reuse one operand.
                const u32 column = i % 2 == 0 ? j : THREAD_COLUMNS - 1 - j;
                acc[i * THREAD_COLUMNS + column] = fma_f32(o.a[i], o.b[column], acc[i * THREAD_COLUMNS + column]);
            }
    }
}
