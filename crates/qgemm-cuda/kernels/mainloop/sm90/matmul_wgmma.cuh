// Hopper `matmul` main loop.
// A producer thread copies k-tiles of A and B by TMA to a ring
// of stages. Consumer warpgroups multiply them in place with
// `wgmma`, 64 rows of A each.
//
// Operands are K-major or MN-major, with the 128-byte swizzle.
// K-major: one box of 64 values of k for all rows of the tile.
// MN-major: boxes of 64 × 64, one per 64 values along M or N.
// Either way 64 values along M or N take BOX_BYTES.
// TF32 and E4M3 operands are K-major: 32 or 128 values of k in
// a row of 128 bytes.
// TF32 A passes through registers, where it is rounded; TF32 B
// is rounded beforehand.
#pragma once
#include "atoms/mbarrier.cuh"
#include "atoms/tma_batch.cuh"
#include "atoms/warp.cuh"
#include "atoms/wgmma_fp8_shared.cuh"
#include "atoms/wgmma_shared.cuh"
#include "mainloop/sm90/matmul_items.cuh"
#include "mainloop/sm90/tf32_rows.cuh"

constexpr u32 BOX = 64, ROW_BYTES = 128, BOX_BYTES = BOX * ROW_BYTES;
// K-steps of 32 bytes.
constexpr u32 K_STEPS = QG_TILE_K * QG_A_BYTES / 32;
constexpr bool IS_TF32 = QG_A_BYTES == 4, IS_E4M3 = QG_A_BYTES == 1;
constexpr u32 WARPGROUPS = QG_TILE_M / BOX;
constexpr u32 CONSUMERS = WARPGROUPS * 128;
constexpr u32 ACCUMULATORS = QG_TILE_N / 2;
static_assert(QG_TILE_K * QG_A_BYTES == ROW_BYTES && QG_A_BYTES == QG_B_BYTES, "a row of a box is the swizzle's 128 bytes");
static_assert(QG_A_BYTES == 2 || (QG_A_ALONG_K && QG_B_ALONG_K), "factors of words and of codes are K-major");
static_assert(QG_THREADS == CONSUMERS + 128, "a warpgroup of producers");

struct MatmulStage {
    alignas(1024) u8 a[QG_TILE_M / BOX * BOX_BYTES];  // [box][64 rows or k][128 bytes]
    alignas(1024) u8 b[QG_TILE_N / BOX * BOX_BYTES];  // [box][64 columns or k][128 bytes]
};

struct MatmulRing {
    MatmulStage stage[QG_STAGES];
    u64 full[QG_STAGES];
    u64 empty[QG_STAGES];

    // The first thread initializes, before a CTA barrier.
    QG_DEVICE void init(MatmulRing& ring) {
        init_ring(ring.full, ring.empty, 1, CONSUMERS / 32);
    }
    // A warp calls it when its wgmmas on a stage are complete.
    QG_DEVICE void release(MatmulRing& ring, u32 stage, u32 lane) {
        warp_barrier();
        if (lane == 0) mbarrier_arrive(&ring.empty[stage]);
    }
};

// Copies an operand's k-tile from `first_k` on.
// The tile has OUTER rows or columns from `outer` on.
template <u32 OUTER, bool ALONG_K>
QG_DEVICE void copy_k_tile(u8* shared, const BatchMap& map, u32 outer, u32 first_k, u32 matrix, u64* full) {
    const i32 k = (i32)first_k;
    if constexpr (ALONG_K) {
        cp_async_bulk_tensor_3d(shared, &map, k, (i32)outer, (i32)matrix, full);
    } else {
#pragma unroll
        for (u32 i = 0; i < OUTER / BOX; i++)
            cp_async_bulk_tensor_3d(shared + i * BOX_BYTES, &map, (i32)(outer + i * BOX), k, (i32)matrix, full);
    }
}

// Producer: all k-tiles of this CTA's tiles in sequence,
// zero-filled outside the matrices.
QG_DEVICE void produce(MatmulRing& ring, const TmaMatmulParams& p) {
    Position at = {};
    for (u32 item = cta_index().x; item < p.work; item += grid_ctas().x) {
        const MatmulTile tile = MatmulTile::of(p.matmul, item % p.all_tiles, item / p.all_tiles);
        const u32 a_matrix = tile.product * p.a_per_product, b_matrix = tile.product * p.b_per_product;
#pragma unroll 1
        for (u32 k_tile = tile.begin; k_tile < tile.end; k_tile++) {
            Position::wait_empty(at, ring.empty);
            MatmulStage& stage = ring.stage[at.stage];
            u64* full = &ring.full[at.stage];
            mbarrier_arrive_expect_tx(full, sizeof(MatmulStage));
            const u32 k = tile.k_first + k_tile * QG_TILE_K;
            copy_k_tile<QG_TILE_M, QG_A_ALONG_K>(stage.a, p.a_map, tile.row, k, a_matrix, full);
            copy_k_tile<QG_TILE_N, QG_B_ALONG_K>(stage.b, p.b_map, tile.column, k, b_matrix, full);
            Position::next(at);
        }
    }
}

// Starts acc += A · B over a stage for 64 rows.
// E4M3 starts from zero.
QG_DEVICE void start_stage(float (&acc)[ACCUMULATORS], const MatmulStage& stage, u32 warpgroup) {
    const u8* rows = stage.a + warpgroup * BOX_BYTES;
    const u64 a = QG_A_ALONG_K ? wgmma_descriptor_128b(rows) : wgmma_descriptor_128b_mn(rows, BOX_BYTES);
    const u64 b = QG_B_ALONG_K ? wgmma_descriptor_128b(stage.b) : wgmma_descriptor_128b_mn(stage.b, BOX_BYTES);
    // K-step in the descriptor's units of 16 bytes.
    constexpr u32 A_STEP = QG_A_ALONG_K ? 2 : 2 * BOX, B_STEP = QG_B_ALONG_K ? 2 : 2 * BOX;
    wgmma_fence();
#pragma unroll
    for (u32 step = 0; step < K_STEPS; step++) {
        if constexpr (IS_E4M3)
            step == 0 ? wgmma_shared_k32_e4m3<QG_TILE_N, 0>(acc, a, b)
                      : wgmma_shared_k32_e4m3<QG_TILE_N, 1>(acc, a + step * A_STEP, b + step * B_STEP);
        else if constexpr (QG_DTYPE == DTYPE_F16)
            wgmma_shared_k16_f16<QG_TILE_N, !QG_A_ALONG_K, !QG_B_ALONG_K>(acc, a + step * A_STEP, b + step * B_STEP);
        else
            wgmma_shared_k16_bf16<QG_TILE_N, !QG_A_ALONG_K, !QG_B_ALONG_K>(acc, a + step * A_STEP, b + step * B_STEP);
    }
    wgmma_commit_group();
}

// Zeroes a stage from value `k` of its k-tile on:
// these values belong to the next product's part of K.
// Operands are MN-major here, so a box row is one value of k.
// All consumers take part.
QG_DEVICE void clear_behind(MatmulStage& stage, u32 k, u32 thread) {
    constexpr u32 BOXES = (QG_TILE_M + QG_TILE_N) / BOX, CHUNKS = ROW_BYTES / 16;
    const u32 rows = BOX - k;
    for (u32 i = thread; i < BOXES * rows * CHUNKS; i += CONSUMERS) {
        const u32 box = i / (rows * CHUNKS), row = i / CHUNKS % rows, chunk = i % CHUNKS;
        st_shared(reinterpret_cast<u32x4*>(stage.a + box * BOX_BYTES + (k + row) * ROW_BYTES + chunk * 16),
                  u32x4{0, 0, 0, 0});
    }
    fence_proxy_async();
    matmul_barrier<CONSUMERS>();
}

// acc += A · B over the k-tiles of a work item, E4M3.
// The MMA keeps about 14 bits, so f32 adds the
// sums of each stage.
// One warpgroup adds while the other's wgmmas run.
QG_DEVICE void multiply_codes(float (&acc)[ACCUMULATORS], MatmulRing& ring, Position& at, const MatmulTile& tile,
                              u32 warpgroup, u32 lane) {
#pragma unroll 1
    for (u32 k_tile = tile.begin; k_tile < tile.end; k_tile++) {
        mbarrier_wait(&ring.full[at.stage], at.parity);
        float sums[ACCUMULATORS];
        wgmma_fence_accumulators(sums);
        start_stage(sums, ring.stage[at.stage], warpgroup);
        wgmma_wait_group<0>();
        wgmma_fence_accumulators(sums);
        MatmulRing::release(ring, at.stage, lane);
#pragma unroll
        for (u32 i = 0; i < ACCUMULATORS; i++) acc[i] += sums[i];
        Position::next(at);
    }
}

// acc += A · B over a TF32 k-tile.
// A is loaded during the previous stage's wgmmas; that stage
// is then released.
QG_DEVICE void multiply_words_of_stage(float (&acc)[ACCUMULATORS], Tf32Rows& a, MatmulRing& ring, Position& at, u32& before, u32 warpgroup,
                                       u32 warp, u32 lane) {
    mbarrier_wait(&ring.full[at.stage], at.parity);
    const MatmulStage& stage = ring.stage[at.stage];
    Tf32Rows::load(a, stage.a + warpgroup * BOX_BYTES, warp, lane);
    const u64 b = wgmma_descriptor_128b(stage.b);
#pragma unroll
    for (u32 step = 0; step < K_STEPS; step++) wgmma_fence_operand(a.step[step]);
    wgmma_fence();
#pragma unroll
    for (u32 step = 0; step < K_STEPS; step++) wgmma_k8_tf32<QG_TILE_N>(acc, a.step[step], b + step * 2);
    wgmma_commit_group();
    wgmma_wait_group<1>();
    if (before < QG_STAGES) MatmulRing::release(ring, before, lane);
    before = at.stage;
    Position::next(at);
}

// acc += A · B over the k-tiles of a work item, TF32.
// Two k-tiles alternate, in separate registers.
QG_DEVICE void multiply_words(float (&acc)[ACCUMULATORS], MatmulRing& ring, Position& at, const MatmulTile& tile, u32 thread,
                              u32 warpgroup, u32 lane) {
    const u32 warp = thread / 32;
    Tf32Rows a[2];
    u32 before = QG_STAGES, k_tile = tile.begin;
#pragma unroll 1
    for (; k_tile + 2 <= tile.end; k_tile += 2) {
        multiply_words_of_stage(acc, a[0], ring, at, before, warpgroup, warp, lane);
        multiply_words_of_stage(acc, a[1], ring, at, before, warpgroup, warp, lane);
    }
    wgmma_wait_group<0>();
    if (k_tile < tile.end) {
        multiply_words_of_stage(acc, a[0], ring, at, before, warpgroup, warp, lane);
        wgmma_wait_group<0>();
    }
    if (before < QG_STAGES) MatmulRing::release(ring, before, lane);
}

// Main loop of a work item, for a warpgroup's 64 rows.
// A stage's wgmmas are issued while the previous ones run.
QG_DEVICE void multiply(float (&acc)[ACCUMULATORS], MatmulRing& ring, Position& at, const MatmulParams& p,
                        const MatmulTile& tile, u32 thread, u32 warpgroup, u32 lane) {
    if constexpr (IS_E4M3) {
        multiply_codes(acc, ring, at, tile, warpgroup, lane);
        return;
    }
    if constexpr (IS_TF32) {
        multiply_words(acc, ring, at, tile, thread, warpgroup, lane);
        return;
    }
    u32 before = 0, whole_end = tile.end;
    // TMA zero-fills past K, but not past a product's part of K.
    bool clears = false;
    if constexpr (QG_MAY_GROUP_K)
        clears = (p.shape.flags & QG_FLAG_K_GROUPED) && tile.begin < tile.end && tile.end * QG_TILE_K > tile.k_len;
    if (clears) whole_end--;
#pragma unroll 1
    for (u32 k_tile = tile.begin; k_tile < whole_end; k_tile++) {
        mbarrier_wait(&ring.full[at.stage], at.parity);
        start_stage(acc, ring.stage[at.stage], warpgroup);
        wgmma_wait_group<1>();
        if (k_tile > tile.begin) MatmulRing::release(ring, before, lane);
        before = at.stage;
        Position::next(at);
    }
    wgmma_wait_group<0>();
    if (tile.begin < whole_end) MatmulRing::release(ring, before, lane);
    if constexpr (QG_MAY_GROUP_K) {
        if (!clears) return;
        mbarrier_wait(&ring.full[at.stage], at.parity);
        clear_behind(ring.stage[at.stage], tile.k_len - whole_end * QG_TILE_K, thread);
        start_stage(acc, ring.stage[at.stage], warpgroup);
        wgmma_wait_group<0>();
        MatmulRing::release(ring, at.stage, lane);
        Position::next(at);
    }
}
