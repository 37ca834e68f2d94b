// Hopper `matmul` main loop for block-scaled E4M3 along K.
// A stage of the ring is one block of K.
// One producer warp copies codes by TMA, the others scales.
// Consumer warpgroups multiply 64 rows of A each, in place.
// The MMA keeps about 14 bits of a sum, so f32 adds the sums
// of each block, times both scales.
#pragma once
#include "atoms/mbarrier.cuh"
#include "atoms/numeric.cuh"
#include "atoms/tma_batch.cuh"
#include "atoms/warp.cuh"
#include "atoms/wgmma_fp8_shared.cuh"
#include "mainloop/sm90/matmul_items.cuh"

constexpr u32 WARPGROUP_ROWS = 64, ROW_BYTES = 128, ROW_CHUNKS = ROW_BYTES / 16;
constexpr u32 WARPGROUPS = QG_TILE_M / WARPGROUP_ROWS;
constexpr u32 CONSUMERS = WARPGROUPS * 128;
constexpr u32 ACCUMULATORS = QG_TILE_N / 2;
constexpr u32 INSTRUCTION_K = 32, K_STEPS = QG_TILE_K / INSTRUCTION_K;
// Warps that copy scales, each for every third stage, to keep
// several loads in flight.
constexpr u32 SCALE_WARPS = 3;
static_assert(QG_TILE_K == BLOCK && BLOCK == ROW_BYTES, "a row of a block is the swizzle's 128 bytes");
static_assert(QG_THREADS == CONSUMERS + 128, "a warpgroup of producers");

struct MatmulStage {
    alignas(1024) u8 a[QG_TILE_M * ROW_BYTES];  // [row][k]
    alignas(1024) u8 b[QG_TILE_N * ROW_BYTES];  // [column][k]
};

// Scales of the rows of A, then of the columns of B.
struct StageScales {
    alignas(16) float value[QG_TILE_M + QG_TILE_N];
};

struct MatmulRing {
    MatmulStage stage[QG_STAGES];
    StageScales scales[QG_STAGES];
    u64 full[QG_STAGES];
    u64 empty[QG_STAGES];

    // The first thread initializes, before a CTA barrier.
    QG_DEVICE void init(MatmulRing& ring) {
        // Arrivals: the code producer and a scale producer.
        init_ring(ring.full, ring.empty, 2, CONSUMERS / 32);
    }
    // A warp calls it after it has read the stage and its scales.
    QG_DEVICE void release(MatmulRing& ring, u32 stage, u32 lane) {
        warp_barrier();
        if (lane == 0) mbarrier_arrive(&ring.empty[stage]);
    }
};

// One thread copies the codes of all blocks of this CTA's
// tiles, zero-filled outside the matrices.
QG_DEVICE void produce_codes(MatmulRing& ring, const TmaMatmulParams& p) {
    Position at = {};
    for (u32 item = cta_index().x; item < p.work; item += grid_ctas().x) {
        const MatmulTile tile = MatmulTile::of(p.matmul, item % p.all_tiles, item / p.all_tiles);
#pragma unroll 1
        for (u32 k_tile = tile.begin; k_tile < tile.end; k_tile++) {
            Position::wait_empty(at, ring.empty);
            MatmulStage& stage = ring.stage[at.stage];
            u64* full = &ring.full[at.stage];
            mbarrier_arrive_expect_tx(full, sizeof(MatmulStage));
            const i32 k = (i32)(tile.k_first + k_tile * QG_TILE_K);
            cp_async_bulk_tensor_3d(stage.a, &p.a_map, k, (i32)tile.row, 0, full);
            cp_async_bulk_tensor_3d(stage.b, &p.b_map, k, (i32)tile.column, 0, full);
            Position::next(at);
        }
    }
}

// Scale warp `warp`. Rows and columns outside D get zeros.
QG_DEVICE void produce_scales(MatmulRing& ring, const TmaMatmulParams& params, u32 warp, u32 lane) {
    const MatmulParams& p = params.matmul;
    constexpr u32 EACH = (QG_TILE_M + QG_TILE_N) / 32;
    Position at = {};
    u32 turn = 0;
    for (u32 item = cta_index().x; item < params.work; item += grid_ctas().x) {
        const MatmulTile tile = MatmulTile::of(p, item % params.all_tiles, item / params.all_tiles);
        const u8 *of_a = block_scales(p.at.a_scale, tile), *of_b = block_scales(p.at.b_scale, tile);
#pragma unroll 1
        for (u32 k_tile = tile.begin; k_tile < tile.end; k_tile++) {
            if (turn == warp) {
                float v[EACH];
#pragma unroll
                for (u32 i = 0; i < EACH; i++) {
                    const bool is_a = i < QG_TILE_M / 32;
                    const u32 outer = is_a ? tile.row + i * 32 + lane : tile.column + i * 32 - QG_TILE_M + lane;
                    const u8* from = (is_a ? of_a : of_b) + (outer * (is_a ? p.scales.a_row : p.scales.b_row) + k_tile) * 4;
                    v[i] = outer < (is_a ? p.shape.m : p.shape.n) ? bits_to_f32(ld_global_u32(from)) : 0.0f;
                }
                Position::wait_empty(at, ring.empty);
#pragma unroll
                for (u32 i = 0; i < EACH; i++) st_shared(&ring.scales[at.stage].value[i * 32 + lane], v[i]);
                warp_barrier();
                if (lane == 0) mbarrier_arrive(&ring.full[at.stage]);
            }
            turn = turn + 1 == SCALE_WARPS ? 0 : turn + 1;
            Position::next(at);
        }
    }
}

// Keeps the bytes of `word` with value index in [first, end).
// The word starts at value `k`.
QG_DEVICE u32 kept(u32 word, u32 k, u32 first, u32 end) {
    u32 mask = 0;
#pragma unroll
    for (u32 i = 0; i < 4; i++)
        if (k + i >= first && k + i < end) mask |= 0xffu << (8 * i);
    return word & mask;
}

// Zeroes a stage outside values [first, end),
// the product's part.
// All consumers take part.
QG_DEVICE void clear_outside(MatmulStage& stage, u32 first, u32 end, u32 thread) {
    for (u32 i = thread; i < (QG_TILE_M + QG_TILE_N) * ROW_CHUNKS; i += CONSUMERS) {
        const u32 row = i / ROW_CHUNKS, chunk = i % ROW_CHUNKS, k = chunk * 16;
        if (k >= first && k + 16 <= end) continue;
        u32x4* at = reinterpret_cast<u32x4*>(stage.a + row * ROW_BYTES + (chunk ^ row % 8) * 16);
        const u32x4 v = ld_shared(at);
        st_shared(at, u32x4{kept(v.x, k, first, end), kept(v.y, k + 4, first, end), kept(v.z, k + 8, first, end),
                            kept(v.w, k + 12, first, end)});
    }
    fence_proxy_async();
    matmul_barrier<CONSUMERS>();
}

// Starts sums = A · B over a stage, for a warpgroup's 64 rows.
QG_DEVICE void start_stage(float (&sums)[ACCUMULATORS], const MatmulStage& stage, u32 warpgroup) {
    const u64 a = wgmma_descriptor_128b(stage.a + warpgroup * WARPGROUP_ROWS * ROW_BYTES), b = wgmma_descriptor_128b(stage.b);
    // K-step in the descriptors' units of 16 bytes.
    constexpr u32 STEP = INSTRUCTION_K / 16;
    wgmma_fence_accumulators(sums);
    wgmma_fence();
    wgmma_shared_k32_e4m3<QG_TILE_N, 0>(sums, a, b);
#pragma unroll
    for (u32 step = 1; step < K_STEPS; step++)
        wgmma_shared_k32_e4m3<QG_TILE_N, 1>(sums, a + step * STEP, b + step * STEP);
    wgmma_commit_group();
}

// Adds the sums times row scales and column scales.
// A lane has two rows.
QG_DEVICE void promote(float (&acc)[ACCUMULATORS], const float (&sums)[ACCUMULATORS], const float (&of_row)[2],
                       const f32x2 (&of_columns)[ACCUMULATORS / 4]) {
#pragma unroll
    for (u32 i = 0; i < ACCUMULATORS; i++) {
        const f32x2 pair = of_columns[i / 4];
        acc[i] = fma_f32(sums[i] * of_row[i / 2 % 2], i % 2 == 0 ? pair.x : pair.y, acc[i]);
    }
}

// Main loop of a work item, for a warpgroup's 64 rows.
// One warpgroup adds while the other's wgmmas run.
QG_DEVICE void multiply(float (&acc)[ACCUMULATORS], MatmulRing& ring, Position& at, const MatmulParams& p,
                        const MatmulTile& tile, u32 thread, u32 warpgroup, u32 lane) {
    const u32 row = thread / 32 * 16 + lane / 4;
#pragma unroll 1
    for (u32 k_tile = tile.begin; k_tile < tile.end; k_tile++) {
        mbarrier_wait(&ring.full[at.stage], at.parity);
        MatmulStage& stage = ring.stage[at.stage];
        // TMA zero-fills past K, but not around a product's part of K.
        if (p.shape.flags & QG_FLAG_K_GROUPED) {
            const u32 first = k_tile == 0 ? tile.k_skip : 0, left = tile.k_len - k_tile * BLOCK;
            if (first > 0 || left < BLOCK) clear_outside(stage, first, left < BLOCK ? left : BLOCK, thread);
        }
        float sums[ACCUMULATORS];
        start_stage(sums, stage, warpgroup);
        const float* scales = ring.scales[at.stage].value;
        const float of_row[2] = {ld_shared(&scales[row]), ld_shared(&scales[row + 8])};
        f32x2 of_columns[ACCUMULATORS / 4];
#pragma unroll
        for (u32 j = 0; j < ACCUMULATORS / 4; j++)
            of_columns[j] = ld_shared(reinterpret_cast<const f32x2*>(&scales[QG_TILE_M + j * 8 + lane % 4 * 2]));
        wgmma_wait_group<0>();
        wgmma_fence_accumulators(sums);
        MatmulRing::release(ring, at.stage, lane);
        promote(acc, sums, of_row, of_columns);
        Position::next(at);
    }
}
