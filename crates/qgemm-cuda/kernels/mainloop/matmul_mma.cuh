// Tiles of `matmul` in shared memory, as matrix instructions take them: 16-bit elements, 16 bytes at a time, whichever way
// the matrices are stored. No tile is transposed: `ldmatrix` does that on the way into registers.
//
// A tile of a matrix that is contiguous along K is [outer][k], otherwise [k][outer], where the outer index is that of rows
// of A or columns of B. Chunks of 16 bytes are swizzled, so that the eight of an 8×8 matrix lie in different banks.
#pragma once
#include "atoms/ldmatrix.cuh"
#include "atoms/memory.cuh"
#include "atoms/mma.cuh"
#include "mainloop/matmul_accumulators.cuh"
#include "sched/matmul_tile.cuh"

constexpr u32 CHUNK = 8, CHUNK_BYTES = 16;
constexpr u32 K_CHUNKS = QG_TILE_K / CHUNK;
constexpr u32 K_STEPS = QG_TILE_K / 16;
static_assert(K_CHUNKS == 4, "a row along K is half of the banks");
static_assert(QG_DTYPE == DTYPE_F16 || QG_VARIANT >= 80, "bf16 has instructions from Ampere on");

template <u32 TILE, bool ALONG_K>
struct TileLayout {
    static constexpr u32 ELEMENT_BYTES = 2;
    static constexpr u32 BYTES = TILE * QG_TILE_K * 2;
    static constexpr u32 CHUNKS = BYTES / CHUNK_BYTES;

    // The byte of the chunk that holds (outer, k), both of its first element.
    QG_DEVICE u32 at(u32 outer, u32 k) {
        if constexpr (ALONG_K) return (outer * K_CHUNKS + (k / CHUNK ^ (outer / 2 % 4))) * CHUNK_BYTES;
        return (k * (TILE / CHUNK) + (outer / CHUNK ^ (k % 8))) * CHUNK_BYTES;
    }

    // The place of chunk `i` in the order in which threads copy them: neighbours in memory.
    QG_DEVICE void place(u32 i, u32& outer, u32& k) {
        outer = ALONG_K ? i / K_CHUNKS : i % (TILE / CHUNK) * CHUNK;
        k = ALONG_K ? i % K_CHUNKS * CHUNK : i / (TILE / CHUNK);
    }
};

using TileA = TileLayout<QG_TILE_M, QG_A_ALONG_K>;
using TileB = TileLayout<QG_TILE_N, QG_B_ALONG_K>;

struct MmaStage {
    alignas(128) u8 a[TileA::BYTES];
    alignas(128) u8 b[TileB::BYTES];
};

#include "mainloop/matmul_source.cuh"

static_assert(N_TILES % 2 == 0, "B is loaded for two tiles at once");

// Registers 0 to 3 of A: (rows, k) (0, 0), (8, 0), (0, 8), (8, 8).
QG_DEVICE void load_a(u32 (&a)[4], const u8* tile, u32 row, u32 k, u32 lane) {
    if constexpr (QG_A_ALONG_K)
        ldmatrix_x4(a, tile + TileA::at(row + lane % 16, k + lane / 16 * 8));
    else
        ldmatrix_x4_trans(a, tile + TileA::at(row + lane / 8 % 2 * 8, k + lane / 16 * 8 + lane % 8));
}

// Registers 0 and 1 are those of B's first eight columns, 2 and 3 of the next.
QG_DEVICE void load_b(u32 (&b)[4], const u8* tile, u32 column, u32 k, u32 lane) {
    if constexpr (QG_B_ALONG_K)
        ldmatrix_x4(b, tile + TileB::at(column + lane / 16 * 8 + lane % 8, k + lane / 8 % 2 * 8));
    else
        ldmatrix_x4_trans(b, tile + TileB::at(column + lane / 16 * 8, k + lane / 8 % 2 * 8 + lane % 8));
}

QG_DEVICE void multiply_16(float (&d)[4], const u32 (&a)[4], u32 b0, u32 b1) {
#if QG_VARIANT >= 80
    const u32 b[2] = {b0, b1};
    if constexpr (QG_DTYPE == DTYPE_F16)
        mma_m16n8k16_f16(d, a, b);
    else
        mma_m16n8k16_bf16(d, a, b);
#else
    const u32 low[2] = {a[0], a[1]}, high[2] = {a[2], a[3]};
    mma_m16n8k8_f16(d, low, b0);
    mma_m16n8k8_f16(d, high, b1);
#endif
}

// Adds the products of a stage.
QG_DEVICE void multiply_stage(Accumulators& acc, const MmaStage& stage, u32 warp, u32 lane) {
    const u32 row = warp / QG_WARPS_N * WARP_M, column = warp % QG_WARPS_N * WARP_N;
#pragma unroll
    for (u32 step = 0; step < K_STEPS; step++) {
        u32 a[M_TILES][4], b[N_TILES / 2][4];
#pragma unroll
        for (u32 j = 0; j < N_TILES / 2; j++) load_b(b[j], stage.b, column + j * 16, step * 16, lane);
#pragma unroll
        for (u32 i = 0; i < M_TILES; i++) load_a(a[i], stage.a, row + i * 16, step * 16, lane);
#pragma unroll
        for (u32 i = 0; i < M_TILES; i++)
#pragma unroll
            for (u32 j = 0; j < N_TILES; j++)
                multiply_16(acc.value[i][j], a[i], b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]);
    }
}
