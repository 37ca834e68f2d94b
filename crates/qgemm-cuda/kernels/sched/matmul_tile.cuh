// Matmul scheduling: parameters, the tile and K range of a
// CTA, and the split-K fix-up.
#pragma once
#include "atoms/launch.cuh"
#include "atoms/memory.cuh"
#include "atoms/sync.cuh"
#include "generated/abi.cuh"

struct MatmulParams {
    MatmulShape shape;
    MatmulTypes types;
    MatmulTiles tiles;
    MatmulPointers at;
#if QG_BLOCK_SCALED
    MatmulScales scales;
#endif
};

#if QG_BLOCK_SCALED
// Values along K per scale of a row of A or a column of B.
constexpr u32 BLOCK = 128;
static_assert(BLOCK % QG_TILE_K == 0, "a k-tile has the scales of one block");
#endif

struct MatmulTile {
    // Product, first row and column of its tile, and k-tiles
    // [begin, end) of the product's part of K.
    u32 product, row, column, begin, end;
    // The product's part of K: all of K, unless K is grouped.
    u32 k_first, k_len;
#if QG_BLOCK_SCALED
    // Leading values that belong to the previous product:
    // a part is extended to start at a whole block.
    u32 k_skip = 0;
#endif
    // Tile number over all products, and the CTA's
    // rank in its split.
    u32 tile, split;

    // For a grid (tile, split).
    QG_DEVICE MatmulTile of_cta(const MatmulParams& p) {
        const u32x3 cta = cta_index();
        return of(p, cta.x, cta.y);
    }

    // Tiles are grouped by GROUP along M; a group covers all of N.
    // Concurrent CTAs then share A and B in L2.
    QG_DEVICE MatmulTile of(const MatmulParams& p, u32 tile, u32 split) {
        constexpr u32 GROUP = 8;
        const u32 of_product = p.tiles.m_tiles * p.tiles.n_tiles;
        MatmulTile t;
        t.tile = tile;
        t.split = split;
        t.product = tile / of_product;
        const u32 place = tile % of_product;
        const u32 first = place / (GROUP * p.tiles.n_tiles) * GROUP;
        const u32 left = p.tiles.m_tiles - first, height = left < GROUP ? left : GROUP;
        const u32 rest = place - first * p.tiles.n_tiles;
        t.row = (first + rest % height) * QG_TILE_M;
        t.column = rest / height * QG_TILE_N;
        t.k_first = 0, t.k_len = p.shape.k;
        u32 k_tiles = p.tiles.k_tiles;
        if constexpr (QG_MAY_GROUP_K) {
            if (p.shape.flags & QG_FLAG_K_GROUPED) {
                set_k_group(t, p);
                k_tiles = (t.k_len + QG_TILE_K - 1) / QG_TILE_K;
            }
        }
#if QG_BLOCK_SCALED
        // Split K at whole blocks.
        constexpr u32 EACH = BLOCK / QG_TILE_K;
        const u32 blocks = (k_tiles + EACH - 1) / EACH, end = first_k_tile(blocks, p.tiles.splits, split + 1) * EACH;
        t.begin = first_k_tile(blocks, p.tiles.splits, split) * EACH;
        t.end = end < k_tiles ? end : k_tiles;
#else
        t.begin = first_k_tile(k_tiles, p.tiles.splits, split);
        t.end = first_k_tile(k_tiles, p.tiles.splits, split + 1);
#endif
        return t;
    }

    // Reads the product's part of K, clamped to K; never negative.
    QG_DEVICE void set_k_group(MatmulTile& t, const MatmulParams& p) {
        // Earlier work may write the offsets.
        griddepcontrol_wait();
        const u8* at = reinterpret_cast<const u8*>(p.at.offsets) + (u64)t.product * 4;
        const u32 first = ld_global_u32(at), end = ld_global_u32(at + 4);
        t.k_first = first < p.shape.k ? first : p.shape.k;
        const u32 last = end < p.shape.k ? end : p.shape.k;
#if QG_BLOCK_SCALED
        t.k_skip = t.k_first % BLOCK;
        t.k_first -= t.k_skip;
        t.k_len = last > t.k_first + t.k_skip ? last - t.k_first : 0;
#else
        t.k_len = last > t.k_first ? last - t.k_first : 0;
#endif
    }

    // split * k_tiles / splits without 64-bit arithmetic.
    QG_DEVICE u32 first_k_tile(u32 k_tiles, u32 splits, u32 split) {
        const u32 whole = k_tiles / splits, rest = k_tiles % splits;
        return split * whole + split * rest / splits;
    }
};

// Defines the CTA's tile and its problem.
// With grouped rows the problem is one product; CTAs without
// rows return here.
#if QG_GROUPS_ROWS
#include "sched/matmul_rows.cuh"
#else
#define QG_TAKE_MATMUL_TILE(p, tile, given) \
    const MatmulParams& p = given;          \
    const MatmulTile tile = MatmulTile::of_cta(p)
#endif

#if QG_BLOCK_SCALED
// Scales of the operand's first row or column, from the
// product's first block on.
QG_DEVICE const u8* block_scales(u64 scales, const MatmulTile& t) {
    return reinterpret_cast<const u8*>(scales) + (u64)(t.k_first / BLOCK) * 4;
}
#endif

// This thread's partial sums in the workspace.
// A CTA has COUNT accumulators in each of its first
// THREADS threads.
template <u32 COUNT, u32 THREADS>
QG_DEVICE f32x4* matmul_partials(const MatmulParams& p, const MatmulTile& t, u32 split, u32 thread) {
    float* all = reinterpret_cast<float*>(p.at.workspace + p.at.partials);
    return reinterpret_cast<f32x4*>(all + ((u64)t.tile * p.tiles.splits + split) * (COUNT * THREADS)) + thread;
}

// Barrier of the threads that hold accumulators.
template <u32 THREADS>
QG_DEVICE void matmul_barrier() {
    if constexpr (THREADS == QG_THREADS)
        cta_barrier();
    else
        barrier_sync(1, THREADS);
}

// Split-K fix-up: the last CTA to arrive adds all partial sums.
// It adds in order of K: the bits do not depend on which CTA
// is last. Returns false in the other CTAs.
// `flag` is a word of shared memory. No CTA spins.
template <u32 COUNT, u32 THREADS = QG_THREADS>
QG_DEVICE bool add_matmul_partials(float* acc, const MatmulParams& p, const MatmulTile& t, u32 thread, u32* flag) {
    f32x4* mine = matmul_partials<COUNT, THREADS>(p, t, t.split, thread);
#pragma unroll
    for (u32 i = 0; i < COUNT; i += 4)
        st_global_f32x4(mine + i / 4 * THREADS, f32x4{acc[i], acc[i + 1], acc[i + 2], acc[i + 3]});
    // The barriers extend one thread's arrival to all threads.
    matmul_barrier<THREADS>();
    if (thread == 0) {
        u32* counter = reinterpret_cast<u32*>(p.at.workspace) + t.tile;
        const bool last = atomic_add_acq_rel(counter, 1) == p.tiles.splits - 1;
        // The next launch needs a zero counter.
        if (last) st_global_relaxed_u32(counter, 0);
        st_shared(flag, (u32)last);
    }
    matmul_barrier<THREADS>();
    if (ld_shared(flag) == 0) return false;
#pragma unroll
    for (u32 i = 0; i < COUNT; i++) acc[i] = 0.0f;
#pragma unroll 1
    for (u32 split = 0; split < p.tiles.splits; split++) {
        const f32x4* theirs = matmul_partials<COUNT, THREADS>(p, t, split, thread);
#pragma unroll
        for (u32 i = 0; i < COUNT; i += 4) {
            const f32x4 v = ld_global_cg_f32x4(theirs + i / 4 * THREADS);
            acc[i] += v.x, acc[i + 1] += v.y, acc[i + 2] += v.z, acc[i + 3] += v.w;
        }
    }
    return true;
}
