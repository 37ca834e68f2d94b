// `matmul` of E4M3 operands along K, on FP8 MMA.
// The MMA keeps about 14 bits of a sum.
// So sums cover one block of K, 128 values.
#pragma once
#include "atoms/ldmatrix.cuh"
#include "atoms/memory.cuh"
#include "atoms/mma_fp8.cuh"
#include "mainloop/matmul_accumulators.cuh"
#include "sched/matmul_tile.cuh"

constexpr u32 INSTRUCTION_K = 32, K_STEPS = QG_TILE_K / INSTRUCTION_K, K_CHUNKS = QG_TILE_K / 16;
static_assert(K_CHUNKS == 4, "a row along K is half of the banks");
static_assert(QG_A_ALONG_K && QG_B_ALONG_K, "bytes are not transposed");

// [outer][k] in 16-byte chunks, swizzled as in
// `matmul_tiles.cuh`.
template <u32 TILE>
struct CodeTile {
    static constexpr u32 OUTER = TILE, CHUNK = 16;
    static constexpr u32 BYTES = TILE * QG_TILE_K;

    // Byte offset of the chunk of (outer, k); k is its first code.
    QG_DEVICE u32 at(u32 outer, u32 k) {
        return (outer * K_CHUNKS + (k / CHUNK ^ (outer / 2 % 4))) * CHUNK;
    }
};

using TileA = CodeTile<QG_TILE_M>;
using TileB = CodeTile<QG_TILE_N>;

#include "mainloop/matmul_source.cuh"

static_assert(N_TILES % 2 == 0, "B is loaded for two tiles at once");

struct MmaStage {
    alignas(128) u8 a[TileA::BYTES];  // [row][k]
    alignas(128) u8 b[TileB::BYTES];  // [column][k]
};

constexpr u32 SUMMED_TILES = 128 / QG_TILE_K;

// Adds a block's sums to the total.
// Then they are 0.
QG_DEVICE void add_sums(Accumulators& all, Accumulators& sums) {
#pragma unroll
    for (u32 i = 0; i < M_TILES; i++)
#pragma unroll
        for (u32 j = 0; j < N_TILES; j++)
#pragma unroll
            for (u32 e = 0; e < TILE_SUMS; e++) all.value[i][j][e] += sums.value[i][j][e], sums.value[i][j][e] = 0.0f;
}

// Adds the products of a stage.
// `ldmatrix` treats two codes as one 16-bit element.
QG_DEVICE void multiply_stage(Accumulators& acc, const MmaStage& stage, u32 warp, u32 lane) {
    const u32 row = warp / QG_WARPS_N * WARP_M, column = warp % QG_WARPS_N * WARP_N;
#pragma unroll
    for (u32 step = 0; step < K_STEPS; step++) {
        const u32 k = step * INSTRUCTION_K;
        u32 a[M_TILES][4], b[N_TILES / 2][4];
#pragma unroll
        for (u32 j = 0; j < N_TILES / 2; j++)
            ldmatrix_x4(b[j], stage.b + TileB::at(column + j * 16 + lane / 16 * 8 + lane % 8, k + lane / 8 % 2 * 16));
#pragma unroll
        for (u32 i = 0; i < M_TILES; i++)
            ldmatrix_x4(a[i], stage.a + TileA::at(row + i * 16 + lane % 16, k + lane / 16 * 16));
#pragma unroll
        for (u32 i = 0; i < M_TILES; i++)
#pragma unroll
            for (u32 j = 0; j < N_TILES; j++) {
                const u32 of_tile[2] = {b[j / 2][j % 2 * 2], b[j / 2][j % 2 * 2 + 1]};
                mma_m16n8k32_e4m3(acc.value[i][j], a[i], of_tile);
            }
    }
}
