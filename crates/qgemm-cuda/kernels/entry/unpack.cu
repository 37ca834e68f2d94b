// Dequantizes columns of packed W: D[i, n] = W[n,
// first + i]. A warp decodes a k-tile of a row tile
// in registers; k-blocks pass through shared memory,
// so that adjacent lanes store contiguous segments.
#include "atoms/launch.cuh"
#include "atoms/sync.cuh"
#include "dequant/operand.cuh"
#include "epilogue/operands.cuh"
#include "generated/abi.cuh"

struct UnpackParams {
    UnpackShape shape;
    UnpackPointers at;
};

constexpr u32 CTA_ROWS = QG_THREADS / 32 * QG_TILE_ROWS;
// With MmaM16, four words of padding put the columns
// that a warp writes together into different banks.
constexpr u32 PITCH = CTA_ROWS + 4;

struct SharedStorage {
    alignas(16) float value[K_BLOCK * PITCH];

    // Swizzle: swaps pairs of four rows in every
    // other 32, so that vector reads use all banks.
    QG_DEVICE float* at(SharedStorage& shared, u32 column, u32 row) {
        return &shared.value[column * PITCH + (row ^ row / 32 % 2 * 4)];
    }
};
static_assert(sizeof(SharedStorage) == QG_SHARED_BYTES, "the host computes another size");

// Decodes a k-block: (scale · number + minimum) · row factor.
QG_DEVICE void decode_k_block(SharedStorage& shared, const KTile& k_tile, const float (&factor)[LANE_ROWS], u32 k_block,
                              u32 warp, u32 lane) {
#pragma unroll
    for (u32 row = 0; row < LANE_ROWS; row++) {
        const u32 of_cta = warp * QG_TILE_ROWS + (QG_MMA_M8N8K4 ? lane : lane / 4 + row * 8);
#pragma unroll
        for (u32 k_step = 0; k_step < K_STEPS; k_step++) {
            const u32 sub_block = sub_block_of(k_block, k_step / K_STEPS_PER_PARTIAL);
            const float scale = Operands::scale(k_tile, row, sub_block), min = Operands::min(k_tile, row, sub_block);
            float w[4];
            Operands::quad_f32(k_tile, quad_of(k_block, row, k_step), w);
#pragma unroll
            for (u32 i = 0; i < 4; i++) {
                const u32 of_step = QG_MMA_M8N8K4 ? i : lane % 4 * 2 + i % 2 + i / 2 * 8;
                st_shared(SharedStorage::at(shared, k_step * K_STEP + of_step, of_cta), (scale * w[i] + min) * factor[row]);
            }
        }
    }
}

// Stored rows of W. A gated pair alternates
// eight gate rows and eight up rows.
QG_DEVICE u32 stored_rows(const UnpackParams& p) {
    const u32 rows = p.shape.out_features;
    return p.shape.flags & QG_FLAG_GATED ? (rows + 7) / 8 * 16 : rows;
}

// Stores the columns of D within this k-block,
// from stored column `first_column` on.
QG_DEVICE void store_k_block(const UnpackParams& p, SharedStorage& shared, u32 first_row, u32 first_column,
                             u32 thread) {
    constexpr u32 RUNS = CTA_ROWS / RUN;
#pragma unroll 2
    for (u32 i = thread; i < K_BLOCK * RUNS; i += QG_THREADS) {
        const u32 column = i / RUNS, of_cta = i % RUNS * RUN, stored = first_column + column, row = first_row + of_cta;
        const u32 feature = p.shape.flags & QG_FLAG_K_ORDER
                                ? ld_global_u32(reinterpret_cast<const u8*>(p.at.k_order) + (u64)stored * 4)
                                : stored;
        // Features below `first` wrap around; padding columns
        // exceed the last feature. Both fail the bound.
        const u32 d_row = feature - p.shape.first;
        const bool gated = p.shape.flags & QG_FLAG_GATED;
        const u32 of_weight = gated ? row / 16 * 8 : row;
        if (d_row >= p.shape.features || of_weight >= p.shape.out_features) continue;
        const u32 left = p.shape.out_features - of_weight;
        // Up columns follow all gate columns.
        const u32 d_column = of_weight + (gated && row % 16 != 0 ? p.shape.out_features : 0);
        float v[RUN];
#pragma unroll
        for (u32 e = 0; e < RUN; e += 4) {
            const f32x4 four = ld_shared(reinterpret_cast<const f32x4*>(SharedStorage::at(shared, column, of_cta + e)));
            v[e] = four.x, v[e + 1] = four.y, v[e + 2] = four.z, v[e + 3] = four.w;
        }
        store_dense_run(p.shape.d_dtype, p.at.d, d_row * p.at.d_row + d_column, p.shape.flags & QG_FLAG_D_ALIGNED16,
                        left < RUN ? left : RUN, v);
    }
}

extern "C" __global__ void __launch_bounds__(QG_THREADS, 1) qg_unpack(const __grid_constant__ UnpackParams p) {
    SharedStorage& shared = *reinterpret_cast<SharedStorage*>(dynamic_shared());
    const u32 thread = thread_index(), lane = thread % 32, warp = thread / 32, cta = cta_index().x;
    const u32 first_row = cta % p.shape.row_groups * CTA_ROWS, k_tile = p.shape.first_k_tile + cta / p.shape.row_groups;
    const u32 rows = stored_rows(p), tiles = (rows + QG_TILE_ROWS - 1) / QG_TILE_ROWS;
    // Warps beyond the last row tile
    // decode it again and store nothing.
    const u32 wanted = first_row / QG_TILE_ROWS + warp, tile = wanted < tiles ? wanted : tiles - 1;

    griddepcontrol_launch_dependents();
    const u8* bytes = reinterpret_cast<const u8*>(p.at.w) + ((u64)tile * p.shape.k_tiles + k_tile) * QG_K_TILE_BYTES;
    KTile codes;
    KTile::load_scales<FromGlobal>(codes, bytes, lane);
    float factor[LANE_ROWS];
#pragma unroll
    for (u32 row = 0; row < LANE_ROWS; row++) {
        const u32 n = tile * QG_TILE_ROWS + (QG_MMA_M8N8K4 ? lane : lane / 4 + row * 8);
        const bool has = p.shape.flags & QG_FLAG_ROW_SCALE && n < rows;
        factor[row] = has ? bits_to_f32(ld_global_u32(reinterpret_cast<const u8*>(p.at.row_scale) + (u64)n * 4)) : 1.0f;
    }
    griddepcontrol_wait();
#pragma unroll
    for (u32 k_block = 0; k_block < K_BLOCKS; k_block++) {
        KTile::load_codes<FromGlobal>(codes, bytes, k_block, lane);
        if (k_block > 0) cta_barrier();
        decode_k_block(shared, codes, factor, k_block, warp, lane);
        cta_barrier();
        store_k_block(p, shared, first_row, k_tile * QG_K_TILE + k_block * K_BLOCK, thread);
    }
}
