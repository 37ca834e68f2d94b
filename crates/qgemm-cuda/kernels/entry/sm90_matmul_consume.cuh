// Persistent `matmul` on Hopper:
// shared storage and the consumers' work.
// The main loop, included before, multiplies a tile.
#pragma once
#include "atoms/registers.cuh"
#include "epilogue/matmul_warpgroup_store.cuh"

struct SharedStorage {
    MatmulRing ring;
    WarpgroupStaging staging[CONSUMERS / 32];
    u32 last;
};
static_assert(sizeof(SharedStorage) == QG_SHARED_BYTES, "the host computes another size");

// With one consumer warpgroup, threads start with the
// maximum of registers.
constexpr bool PASS_REGISTERS = WARPGROUPS > 1;
constexpr u32 PRODUCER_REGISTERS = 40, CONSUMER_REGISTERS = 232;

QG_DEVICE void consume(SharedStorage& shared, const TmaMatmulParams& params, u32 thread) {
    const MatmulParams& p = params.matmul;
    const u32 lane = thread % 32, warp = shfl_idx_u32(thread / 32, 0);
    Position at = {};
    for (u32 item = cta_index().x; item < params.work; item += grid_ctas().x) {
        const MatmulTile tile = MatmulTile::of(p, item % params.all_tiles, item / params.all_tiles);
        float acc[ACCUMULATORS] = {};
        multiply(acc, shared.ring, at, p, tile, thread, warp / 4, lane);
        if (p.tiles.splits > 1 && !add_matmul_partials<ACCUMULATORS, CONSUMERS>(acc, p, tile, thread, &shared.last))
            continue;
        store_matmul_rows(acc, p, tile.product, tile.row + warp * 16, tile.column, shared.staging[warp], lane);
    }
}
