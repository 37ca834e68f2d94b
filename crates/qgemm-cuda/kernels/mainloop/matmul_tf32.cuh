// f32 `matmul` on TF32 MMA.
// Values become TF32 between shared memory and the MMA.
// `ldmatrix` cannot transpose 32-bit elements:
// lanes load words, for either order of the tile.
#pragma once
#include "atoms/memory.cuh"
#include "atoms/mma.cuh"
#include "atoms/numeric.cuh"
#include "mainloop/matmul_accumulators.cuh"
#include "sched/matmul_tile.cuh"

constexpr u32 K_STEPS = QG_TILE_K / 8;

// [outer][k] if the matrix is contiguous along K,
// else [k][outer].
// Padding: the 4 × 8 words that lanes load use different banks.
template <u32 TILE, bool ALONG_K>
struct F32Tile {
    static constexpr u32 OUTER = TILE, CHUNK = 4;
    static constexpr u32 PITCH = ALONG_K ? QG_TILE_K + 4 : TILE + 8;
    static constexpr u32 BYTES = TILE * (QG_TILE_K + 4) * 4;
    static_assert(QG_TILE_K % 32 == 16 && TILE % 32 == 0, "what the padding is for");
    static_assert(ALONG_K || QG_TILE_K * PITCH * 4 <= BYTES, "either way takes as much");

    // Byte offset of (outer, k).
    QG_DEVICE u32 at(u32 outer, u32 k) {
        return (ALONG_K ? outer * PITCH + k : k * PITCH + outer) * 4;
    }

    // Value at (outer, k), rounded to nearest.
    QG_DEVICE u32 tf32(const u8* tile, u32 outer, u32 k) {
        return f32_to_tf32(bits_to_f32(ld_shared(reinterpret_cast<const u32*>(tile + at(outer, k)))));
    }
};

using TileA = F32Tile<QG_TILE_M, QG_A_ALONG_K>;
using TileB = F32Tile<QG_TILE_N, QG_B_ALONG_K>;

struct MmaStage {
    alignas(128) u8 a[TileA::BYTES];  // [row][k] or [k][row]
    alignas(128) u8 b[TileB::BYTES];  // [column][k] or [k][column]
};

#include "mainloop/matmul_source.cuh"

// Adds the products of a stage.
QG_DEVICE void multiply_stage(Accumulators& acc, const MmaStage& stage, u32 warp, u32 lane) {
    const u32 row = warp / QG_WARPS_N * WARP_M + lane / 4, column = warp % QG_WARPS_N * WARP_N + lane / 4;
#pragma unroll
    for (u32 step = 0; step < K_STEPS; step++) {
        const u32 k = step * 8 + lane % 4;
        u32 a[M_TILES][4], b[N_TILES][2];
#pragma unroll
        for (u32 j = 0; j < N_TILES; j++)
#pragma unroll
            for (u32 r = 0; r < 2; r++) b[j][r] = TileB::tf32(stage.b, column + j * 8, k + r * 4);
#pragma unroll
        for (u32 i = 0; i < M_TILES; i++)
#pragma unroll
            for (u32 r = 0; r < 4; r++) a[i][r] = TileA::tf32(stage.a, row + i * 16 + r % 2 * 8, k + r / 2 * 4);
#pragma unroll
        for (u32 i = 0; i < M_TILES; i++)
#pragma unroll
            for (u32 j = 0; j < N_TILES; j++) mma_m16n8k8_tf32(acc.value[i][j], a[i], b[j]);
    }
}
