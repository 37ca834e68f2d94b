// The parameter of kernels that multiply two matrices in device memory, the tile and the K range of a CTA, and the
// fix-up of tiles whose K several CTAs share.
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
// Values along K that share a scale of a row of A, or of a column of B.
constexpr u32 BLOCK = 128;
static_assert(BLOCK % QG_TILE_K == 0, "a k-tile has the scales of one block");
#endif

struct MatmulTile {
    // The product, its tile's first row and first column, and K-tiles [begin, end) of its part of K.
    u32 product, row, column, begin, end;
    // That part: all of K, unless products have one each.
    u32 k_first, k_len;
#if QG_BLOCK_SCALED
    // Values at its beginning that are not the product's: parts begin with whole blocks.
    u32 k_skip = 0;
#endif
    // The tile among those of all products, and the CTA's place among those that share it.
    u32 tile, split;

    // For a grid (tile, split).
    QG_DEVICE MatmulTile of_cta(const MatmulParams& p) {
        const u32x3 cta = cta_index();
        return of(p, cta.x, cta.y);
    }

    // Tiles follow one another in groups of GROUP along M, all columns for each group, so that CTAs at work at once share A
    // and B in the cache.
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
        // Parts are whole blocks.
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

    // Finds the product's part of K. No offset leads out of K, or to fewer than no values.
    QG_DEVICE void set_k_group(MatmulTile& t, const MatmulParams& p) {
        // Offsets are what work before may have written.
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

    // split * k_tiles / splits, in 32 bits.
    QG_DEVICE u32 first_k_tile(u32 k_tiles, u32 splits, u32 split) {
        const u32 whole = k_tiles / splits, rest = k_tiles % splits;
        return split * whole + split * rest / splits;
    }
};

// The tile of this CTA, and the problem that it is part of. Where products share rows, that ends with those of one; CTAs without
// rows end here.
#if QG_GROUPS_ROWS
#include "sched/matmul_rows.cuh"
#else
#define QG_TAKE_MATMUL_TILE(p, tile, given) \
    const MatmulParams& p = given;          \
    const MatmulTile tile = MatmulTile::of_cta(p)
#endif

#if QG_BLOCK_SCALED
// Scales of a factor's first row, or column, from the product's first block on.
QG_DEVICE const u8* block_scales(u64 scales, const MatmulTile& t) {
    return reinterpret_cast<const u8*>(scales) + (u64)(t.k_first / BLOCK) * 4;
}
#endif

// This thread's part of the partial accumulators of a CTA that shares the tile, whose first THREADS threads have COUNT each.
template <u32 COUNT, u32 THREADS>
QG_DEVICE f32x4* matmul_partials(const MatmulParams& p, const MatmulTile& t, u32 split, u32 thread) {
    float* all = reinterpret_cast<float*>(p.at.workspace + p.at.partials);
    return reinterpret_cast<f32x4*>(all + ((u64)t.tile * p.tiles.splits + split) * (COUNT * THREADS)) + thread;
}

// Meets the other threads with accumulators.
template <u32 THREADS>
QG_DEVICE void matmul_barrier() {
    if constexpr (THREADS == QG_THREADS)
        cta_barrier();
    else
        barrier_sync(1, THREADS);
}

// Adds the accumulators of all CTAs that share the tile, in the order of their K ranges, in the one that arrives last, so
// that the bits do not depend on which that is. False in the others, whose work is then done. `flag` is a word of shared
// memory. There is no inter-CTA spinning.
template <u32 COUNT, u32 THREADS = QG_THREADS>
QG_DEVICE bool add_matmul_partials(float* acc, const MatmulParams& p, const MatmulTile& t, u32 thread, u32* flag) {
    f32x4* mine = matmul_partials<COUNT, THREADS>(p, t, t.split, thread);
#pragma unroll
    for (u32 i = 0; i < COUNT; i += 4)
        st_global_f32x4(mine + i / 4 * THREADS, f32x4{acc[i], acc[i + 1], acc[i + 2], acc[i + 3]});
    // Barriers make one thread's arrival that of all.
    matmul_barrier<THREADS>();
    if (thread == 0) {
        u32* counter = reinterpret_cast<u32*>(p.at.workspace) + t.tile;
        const bool last = atomic_add_acq_rel(counter, 1) == p.tiles.splits - 1;
        // The next launch finds the counter at zero.
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
