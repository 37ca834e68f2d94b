// Hopper kernels that decode W to bytes:
// shared storage and warp roles.
// The file included before defines the decoding.
#pragma once
#include "atoms/launch.cuh"
#include "atoms/sync.cuh"
#include "epilogue/warp_store.cuh"
#include "mainloop/register_shares.cuh"
#include "mainloop/sm90/w4a8_product.cuh"

struct SharedStorage {
    Pipeline pipeline;
    WarpStaging staging[QG_WARPS_N];
    WarpScratch scratch[QG_WARPS_N];
#if QG_EXPERT_TILES
    WorkTileInfoRing infos;
    u32 faults[8];
#else
    u32 last;
#endif
};
static_assert(sizeof(SharedStorage) == QG_SHARED_BYTES, "the host computes another size");
static_assert(QG_CONSUMERS == QG_WARPS_N * 32 && QG_CONSUMERS % 128 == 0, "the warps are warpgroups");
static_assert(FIRST_PRODUCER == QG_CONSUMERS, "registers pass between whole warpgroups");

QG_DEVICE void consume(SharedStorage& shared, const W4A8Params& params, u32 thread) {
    const GemmParams& p = params.gemm;
    // The shuffle makes `warp` uniform for the compiler.
    const u32 lane = thread % 32, warp = shfl_idx_u32(thread / 32, 0);
    Position at = {};
    Product::give_first_turn(warp);
#if QG_EXPERT_TILES
#pragma unroll 1
    for (u32 info = 0;; info = WorkTileInfoRing::next(info)) {
        mbarrier_wait(&shared.pipeline.full[at.stage], at.parity);
        const WorkTile work = WorkTileInfo::read(shared.infos.info[info]);
        if (WorkTileInfoRing::is_end(work)) break;
        Accumulators acc;
        multiply_tile(acc, shared.pipeline, at, shared.scratch[warp], params, work, warp, lane);
        // Reloaded: accumulators leave no registers for tile info.
        const WorkTile stored = WorkTileInfo::read(shared.infos.info[info]);
        store_tile(acc, problem_of(p, stored), stored, shared.staging[warp], warp, lane);
    }
#else
    WorkTile work;
    WorkList list = WorkList::of_cta(p);
    while (WorkList::next(list, p, work)) {
        Accumulators acc;
        multiply_tile(acc, shared.pipeline, at, shared.scratch[warp], params, work, warp, lane);
        if (work.peers > 1 && !add_partials(acc, p, work, thread, &shared.last)) continue;
        store_tile(acc, p, work, shared.staging[warp], warp, lane);
    }
#endif
}

// Work of a CTA.
QG_DEVICE void multiply(const W4A8Params& params) {
    SharedStorage& shared = *reinterpret_cast<SharedStorage*>(dynamic_shared());
    const u32 thread = thread_index();
    if (thread == 0) Pipeline::init(shared.pipeline);
    cta_barrier();
    griddepcontrol_launch_dependents();
    // The tile search needs registers.
    using Registers = RegisterShares<QG_EXPERT_TILES && PRODUCER_REGISTERS < 40 ? 40 : PRODUCER_REGISTERS>;
    // The shuffle makes the role uniform for the compiler.
    if (shfl_idx_u32(thread / FIRST_PRODUCER, 0) == 0) {
        Registers::take();
        griddepcontrol_wait();
        consume(shared, params, thread);
    } else {
        Registers::give();
#if QG_EXPERT_TILES
        produce(shared.pipeline, params, thread - FIRST_PRODUCER, shared.infos, shared.faults);
        warp_barrier();
#else
        produce(shared.pipeline, params, thread - FIRST_PRODUCER);
#endif
    }
}
