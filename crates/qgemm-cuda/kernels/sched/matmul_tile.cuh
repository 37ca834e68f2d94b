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
};

struct MatmulTile {
    // The product, its tile's first row and first column, and K-tiles [begin, end).
    u32 product, row, column, begin, end;
    // The tile among those of all products, and the CTA's place among those that share it.
    u32 tile, split;

    // For a grid (tile, split). Tiles follow one another in groups of GROUP along M, all columns for each group, so that
    // CTAs at work at once share A and B in the cache.
    QG_DEVICE MatmulTile of_cta(const MatmulParams& p) {
        constexpr u32 GROUP = 8;
        const u32x3 cta = cta_index();
        const u32 of_product = p.tiles.m_tiles * p.tiles.n_tiles;
        MatmulTile t;
        t.tile = cta.x;
        t.split = cta.y;
        t.product = cta.x / of_product;
        const u32 place = cta.x % of_product;
        const u32 first = place / (GROUP * p.tiles.n_tiles) * GROUP;
        const u32 left = p.tiles.m_tiles - first, height = left < GROUP ? left : GROUP;
        const u32 rest = place - first * p.tiles.n_tiles;
        t.row = (first + rest % height) * QG_TILE_M;
        t.column = rest / height * QG_TILE_N;
        t.begin = first_k_tile(p, cta.y);
        t.end = first_k_tile(p, cta.y + 1);
        return t;
    }

    // split * k_tiles / splits, in 32 bits.
    QG_DEVICE u32 first_k_tile(const MatmulParams& p, u32 split) {
        const u32 whole = p.tiles.k_tiles / p.tiles.splits, rest = p.tiles.k_tiles % p.tiles.splits;
        return split * whole + split * rest / p.tiles.splits;
    }
};

// This thread's part of the partial accumulators of a CTA that shares the tile.
template <u32 COUNT>
QG_DEVICE f32x4* matmul_partials(const MatmulParams& p, const MatmulTile& t, u32 split, u32 thread) {
    float* all = reinterpret_cast<float*>(p.at.workspace + p.at.partials);
    return reinterpret_cast<f32x4*>(all + ((u64)t.tile * p.tiles.splits + split) * (COUNT * QG_THREADS)) + thread;
}

// Adds the accumulators of all CTAs that share the tile, in the order of their K ranges, in the one that arrives last, so
// that the bits do not depend on which that is. False in the others, whose work is then done. `flag` is a word of shared
// memory. There is no inter-CTA spinning.
template <u32 COUNT>
QG_DEVICE bool add_matmul_partials(float* acc, const MatmulParams& p, const MatmulTile& t, u32 thread, u32* flag) {
    f32x4* mine = matmul_partials<COUNT>(p, t, t.split, thread);
#pragma unroll
    for (u32 i = 0; i < COUNT; i += 4)
        st_global_f32x4(mine + i / 4 * QG_THREADS, f32x4{acc[i], acc[i + 1], acc[i + 2], acc[i + 3]});
    fence_gpu();
    cta_barrier();
    if (thread == 0) {
        u32* counter = reinterpret_cast<u32*>(p.at.workspace) + t.tile;
        const bool last = atomic_add_acq_rel(counter, 1) == p.tiles.splits - 1;
        // The next launch finds the counter at zero.
        if (last) st_global_relaxed_u32(counter, 0);
        st_shared(flag, (u32)last);
    }
    cta_barrier();
    if (ld_shared(flag) == 0) return false;
    fence_gpu();
#pragma unroll
    for (u32 i = 0; i < COUNT; i++) acc[i] = 0.0f;
#pragma unroll 1
    for (u32 split = 0; split < p.tiles.splits; split++) {
        const f32x4* theirs = matmul_partials<COUNT>(p, t, split, thread);
#pragma unroll
        for (u32 i = 0; i < COUNT; i += 4) {
            const f32x4 v = ld_global_cg_f32x4(theirs + i / 4 * QG_THREADS);
            acc[i] += v.x, acc[i + 1] += v.y, acc[i + 2] += v.z, acc[i + 3] += v.w;
        }
    }
    return true;
}
