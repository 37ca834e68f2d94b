// Persistent `matmul` on Hopper: work items, tensor
// maps, ring position.
#pragma once
#include "mainloop/ring.cuh"
#include "sched/matmul_tile.cuh"

// Tensor map of a batch of matrices.
struct alignas(64) BatchMap {
    u64 word[16];
};

struct TmaMatmulParams {
    MatmulParams matmul;
    // Tiles of all products, and this number times the K splits.
    u32 all_tiles, work;
    // 1 if each product has a separate matrix, 0 if shared.
    u32 a_per_product, b_per_product;
    BatchMap a_map, b_map;
};

using Position = RingPosition<QG_STAGES>;
