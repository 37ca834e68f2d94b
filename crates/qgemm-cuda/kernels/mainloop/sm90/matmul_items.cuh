// The work items of kernels of `matmul` on Hopper whose CTAs stay, the maps by which TMA reads factors, and positions in their ring.
#pragma once
#include "mainloop/ring.cuh"
#include "sched/matmul_tile.cuh"

// A batch of matrices as TMA sees it.
struct alignas(64) BatchMap {
    u64 word[16];
};

struct TmaMatmulParams {
    MatmulParams matmul;
    // Tiles of all products, and these times the parts of their K.
    u32 all_tiles, work;
    // 1 where each product has a matrix of its own, 0 where all share one.
    u32 a_per_product, b_per_product;
    BatchMap a_map, b_map;
};

using Position = RingPosition<QG_STAGES>;
