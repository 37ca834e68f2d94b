// D[m, n] from weights of four bits and X in E4M3 codes on Hopper, warp-specialized. Consumer warpgroups decode W to E4M3 in
// registers and multiply it with X in shared memory, with `wgmma` on bytes. A producer warpgroup copies both.
#include "atoms/launch.cuh"
#include "atoms/sync.cuh"
#include "epilogue/warp_store.cuh"
#include "mainloop/register_shares.cuh"
#include "mainloop/sm90/w4a8_product.cuh"

struct SharedStorage {
    Pipeline pipeline;
    WarpStaging staging[QG_WARPS_N];
    WarpScratch scratch[QG_WARPS_N];
    u32 last;
};
static_assert(sizeof(SharedStorage) == QG_SHARED_BYTES, "the host computes another size");
static_assert(QG_CONSUMERS == QG_WARPS_N * 32 && QG_CONSUMERS % 128 == 0, "the warps are warpgroups");
static_assert(FIRST_PRODUCER == QG_CONSUMERS, "registers pass between whole warpgroups");

QG_DEVICE void consume(SharedStorage& shared, const W4A8Params& params, u32 thread) {
    const GemmParams& p = params.gemm;
    // The shuffle tells the compiler that the warp is the same for all its lanes.
    const u32 lane = thread % 32, warp = shfl_idx_u32(thread / 32, 0);
    WorkTile work;
    WorkList list = WorkList::of_cta(p);
    Position at = {};
    Product::give_first_turn(warp);
    while (WorkList::next(list, p, work)) {
        Accumulators acc;
        multiply_tile(acc, shared.pipeline, at, shared.scratch[warp], params, work, warp, lane);
        if (work.peers > 1 && !add_partials(acc, p, work, thread, &shared.last)) continue;
        store_tile(acc, p, work, shared.staging[warp], warp, lane);
    }
}

extern "C" __global__ void __launch_bounds__(QG_THREADS, 1)
    qg_sm90_gemm_w4a8_wgmma_ws(const __grid_constant__ W4A8Params params) {
    SharedStorage& shared = *reinterpret_cast<SharedStorage*>(dynamic_shared());
    const u32 thread = thread_index();
    if (thread == 0) Pipeline::init(shared.pipeline);
    cta_barrier();
    griddepcontrol_launch_dependents();
    using Registers = RegisterShares<24>;
    // The shuffle tells the compiler that the role is the same for the whole warp.
    if (shfl_idx_u32(thread / FIRST_PRODUCER, 0) == 0) {
        Registers::take();
        griddepcontrol_wait();
        consume(shared, params, thread);
    } else {
        Registers::give();
        produce(shared.pipeline, params, thread - FIRST_PRODUCER);
    }
}
