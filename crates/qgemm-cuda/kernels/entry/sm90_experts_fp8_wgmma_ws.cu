// Products of rows with their experts from 8-bit floating-point codes of W and of X on Hopper, warp-specialized: what
// sm90_gemm_fp8_wgmma_ws does, with a persistent grid whose CTAs take the tiles of all experts in turn. K is not cut.
#include "atoms/launch.cuh"
#include "atoms/sync.cuh"
#include "epilogue/token_rows_store.cuh"
#include "mainloop/parked_state.cuh"
#include "mainloop/register_shares.cuh"
#include "mainloop/sm90/fp8_expert_producer.cuh"
#include "mainloop/sm90/fp8_product.cuh"
#include "mainloop/sm90/token_factors.cuh"

struct SharedStorage {
    Pipeline pipeline;
    WarpStaging staging[QG_CONSUMERS / 32];
    ParkedState state[QG_CONSUMERS / 32];
    u32 faults[8];
};
static_assert(sizeof(SharedStorage) == QG_SHARED_BYTES, "the host computes another size");
static_assert(QG_CONSUMERS % 128 == 0 && FIRST_PRODUCER == QG_CONSUMERS, "registers pass between whole warpgroups");

// Goes through the stages of a tile without reading them.
QG_DEVICE void pass_stages(Pipeline& pipeline, Position& at, u32 count, u32 lane) {
#pragma unroll 1
    for (; count > 0; count--) {
        mbarrier_wait(&pipeline.full[at.stage], at.parity);
        Pipeline::release(pipeline, at.stage, lane);
        Position::next(at);
    }
}

QG_DEVICE void consume(SharedStorage& shared, const TmaFp8GemmParams& params, u32 thread) {
    // The shuffle tells the compiler that the place is the same for the whole warp.
    const u32 lane = thread % 32, warp = shfl_idx_u32(thread / 32, 0);
    const GemmParams& p = params.fp8.gemm;
    const LanePlace place = LanePlace::of(warp, lane);
    ParkedState& state = shared.state[warp];
    Parked<WorkList>::store(state.list, WorkList::of_cta(p), lane);
    Position at = {};
    while (ParkedState::next(state, p, lane)) {
        const Fp8GemmParams own = problem_of(params.fp8, Parked<WorkTile>::load(state.tile).own);
        if (place.token / 64 * 64 >= own.gemm.shape.m) {
            // The last tile of an expert: all tokens of this warpgroup are beyond it.
            pass_stages(shared.pipeline, at, ParkedState::k_tiles(state), lane);
            continue;
        }
        Accumulators acc;
        multiply_tile(acc, shared.pipeline, at, own.gemm.shape.m, ParkedState::k_tiles(state), place, lane);
        // The tile is loaded again: accumulators leave no registers for it meanwhile.
        if constexpr (!QG_X_BLOCK_SCALES) {
            const OwnRows rows = Parked<WorkTile>::load(state.tile).own;
            scale_tokens(acc, TokenFactors::load(problem_of(params.fp8, rows), place.token));
        }
        const WorkTile tile = Parked<WorkTile>::load(state.tile);
        constexpr u32 FEATURES = PARTS * PART_N;
        const u32 first_token = place.token / 16 * 16, first_row = tile.n_tile * QG_TILE_N + place.group_n * FEATURES;
        const bool is_whole = (tile.n_tile + 1) * QG_TILE_N <= rows_of_outputs(p);
        store_token_rows<FEATURES, ROWS_EXCHANGED>(reinterpret_cast<float*>(&acc), problem_of(p, tile), first_token, first_row,
                                                   place.token % 16, is_whole, shared.staging[warp], lane);
    }
}

#if QG_CLUSTER > 1
extern "C" __global__ void QG_CLUSTER_OF(QG_CLUSTER) __launch_bounds__(QG_THREADS, 1)
#else
extern "C" __global__ void __launch_bounds__(QG_THREADS, 1)
#endif
    qg_sm90_experts_fp8_wgmma_ws(const __grid_constant__ TmaFp8GemmParams params) {
    SharedStorage& shared = *reinterpret_cast<SharedStorage*>(dynamic_shared());
    const u32 thread = thread_index();
    if (thread == 0) Pipeline::init(shared.pipeline);
    meet_cluster();
    griddepcontrol_launch_dependents();
    // Looking for tiles takes registers.
    using Registers = RegisterShares<40>;
    // The shuffle tells the compiler that the role is the same for the whole warp.
    if (shfl_idx_u32(thread / FIRST_PRODUCER, 0) == 0) {
        Registers::take();
        griddepcontrol_wait();
        consume(shared, params, thread);
    } else {
        Registers::give();
        produce_experts(shared.pipeline, params, thread - FIRST_PRODUCER, shared.faults);
        warp_barrier();
    }
    if constexpr (QG_CLUSTER > 1) meet_cluster();
}
