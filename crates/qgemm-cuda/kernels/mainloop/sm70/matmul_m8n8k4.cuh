// `matmul` on Volta's m8n8k4.
// It takes row- or column-major operands, so no
// tile is transposed.
// 16 bytes of shared memory are a lane's operands of two
// instructions: two k-steps if contiguous along K,
// otherwise two tiles.
//
// `LaneCoordinates` gives the rows of A and columns of B of a lane.
#pragma once
#include "atoms/memory.cuh"
#include "atoms/mma.cuh"
#include "atoms/mma_m8n8k4.cuh"
#include "mainloop/matmul_accumulators.cuh"
#include "sched/matmul_tile.cuh"

static_assert(QG_DTYPE == DTYPE_F16, "m8n8k4 takes f16");
static_assert(QG_TILE_K == 32 && WARP_M % 32 == 0 && WARP_N % 32 == 0, "tiles come in pairs");

constexpr u32 CHUNK = 8, CHUNK_BYTES = 16, K_CHUNKS = QG_TILE_K / CHUNK;
constexpr u32 MMA_K = 4;

// A matrix contiguous along K has [outer][k] tiles,
// else [k][outer].
// 16-byte chunks are swizzled. Chunks that eight lanes load or
// store together use different banks:
// eight rows along K, or two chunks in four rows.
template <u32 TILE, bool ALONG_K>
struct TileLayout {
    static constexpr u32 OUTER = TILE, CHUNK = ::CHUNK;
    static constexpr u32 BYTES = TILE * QG_TILE_K * 2;

    // Byte offset of the chunk whose first element is (outer, k).
    QG_DEVICE u32 at(u32 outer, u32 k) {
        if constexpr (ALONG_K) return (outer * K_CHUNKS + (k / CHUNK ^ (outer / 2 % 4))) * CHUNK_BYTES;
        return (k * (TILE / CHUNK) + (outer / CHUNK ^ (k % 4 * 2 + k % 2))) * CHUNK_BYTES;
    }
};

using TileA = TileLayout<QG_TILE_M, QG_A_ALONG_K>;
using TileB = TileLayout<QG_TILE_N, QG_B_ALONG_K>;

#include "mainloop/matmul_source.cuh"

struct MmaStage {
    alignas(128) u8 a[TileA::BYTES];  // [row][k] or [k][row]
    alignas(128) u8 b[TileB::BYTES];  // [column][k] or [k][column]
};

// Operands of TILES tiles of 16 rows of A or columns of B, for
// two k-steps; two words a step.
template <class Tile, bool ALONG_K, u32 TILES>
struct OperandPairs {
    u32 word[TILES][2][2];

    // Loads from `outer` and `k` on.
    // `row` is the lane's row of sixteen (contiguous along K),
    // `chunk` its chunk of four otherwise.
    QG_DEVICE void load(OperandPairs& operands, const u8* tile, u32 outer, u32 k, u32 row, u32 chunk, u32 lane) {
#pragma unroll
        for (u32 i = 0; i < TILES; i++) {
            const u32 at = ALONG_K ? Tile::at(outer + i * 16 + row, k)
                                   : Tile::at(outer + i / 2 * 32 + chunk * CHUNK, k + i % 2 * MMA_K + lane % 4);
            const u32x4 v = ld_shared(reinterpret_cast<const u32x4*>(tile + at));
            // The second half belongs to the next k-step (contiguous along
            // K) or to the next tile.
            u32(&first)[2] = ALONG_K ? operands.word[i][0] : operands.word[i / 2 * 2][i % 2];
            u32(&second)[2] = ALONG_K ? operands.word[i][1] : operands.word[i / 2 * 2 + 1][i % 2];
            first[0] = v.x, first[1] = v.y;
            second[0] = v.z, second[1] = v.w;
        }
    }
};

QG_DEVICE void multiply_pair(float (&d)[8], const u32 (&a)[2], const u32 (&b)[2]) {
    if constexpr (QG_A_ALONG_K && QG_B_ALONG_K)
        mma_m8n8k4_f16(d, a, b);
    else if constexpr (QG_A_ALONG_K)
        mma_m8n8k4_row_row_f16(d, a, b);
    else if constexpr (QG_B_ALONG_K)
        mma_m8n8k4_col_col_f16(d, a, b);
    else
        mma_m8n8k4_col_row_f16(d, a, b);
}

// Adds the products of a stage.
QG_DEVICE void multiply_stage(Accumulators& acc, const MmaStage& stage, u32 warp, u32 lane) {
    const u32 row = warp / QG_WARPS_N * WARP_M, column = warp % QG_WARPS_N * WARP_N;
    const u32 half = lane / 16, row_group = lane / 4 % 2, column_group = lane / 8 % 2;
#pragma unroll
    for (u32 k = 0; k < QG_TILE_K; k += 2 * MMA_K) {
        using PairsA = OperandPairs<TileA, QG_A_ALONG_K, M_TILES>;
        using PairsB = OperandPairs<TileB, QG_B_ALONG_K, N_TILES>;
        PairsA a;
        PairsB b;
        PairsB::load(b, stage.b, column, k, column_group * 8 + half * 4 + lane % 4, column_group + half * 2, lane);
        PairsA::load(a, stage.a, row, k, half * 8 + lane % 8, row_group + half * 2, lane);
#pragma unroll
        for (u32 step = 0; step < 2; step++)
#pragma unroll
            for (u32 i = 0; i < M_TILES; i++)
#pragma unroll
                for (u32 j = 0; j < N_TILES; j++) multiply_pair(acc.value[i][j], a.word[i][step], b.word[j][step]);
    }
}
