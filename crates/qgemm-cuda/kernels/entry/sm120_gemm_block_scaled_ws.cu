// Warp-specialized block-scaled GEMM, sm_120:
// MXFP4 × MXFP4, NVFP4 × NVFP4, and MXFP4 or MXFP8 × MXFP8.
// A producer warpgroup copies packed W and X's codes and scales.
// Consumer warps multiply codes; the MMA applies the scales.
#include "atoms/launch.cuh"
#include "atoms/sync.cuh"
#include "epilogue/token_rows_store.cuh"
#include "mainloop/scheduler_state.cuh"
#include "mainloop/register_shares.cuh"
#include "mainloop/sm120/block_scaled_expert_producer.cuh"
#include "mainloop/sm120/block_scaled_product.cuh"

struct SharedStorage {
    Pipeline pipeline;
    WarpStaging staging[QG_CONSUMERS / 32];
    SchedulerState state[QG_CONSUMERS / 32];
    u32 last;
#if QG_EXPERT_TILES
    u32 faults[8];
#endif
};
static_assert(sizeof(SharedStorage) == QG_SHARED_BYTES, "the host computes another size");
static_assert(sizeof(BlockScaledParams) == sizeof(GemmParams) + 32, "the host lays out another size");

// Shifts M tiles FROM..END to the front.
template <u32 FROM, u32 END>
QG_DEVICE void move_up(Accumulators& acc) {
#pragma unroll
    for (u32 mt = FROM; mt < END; mt++)
#pragma unroll
        for (u32 nt = 0; nt < N_TILES; nt++)
#pragma unroll
            for (u32 i = 0; i < 4; i++) acc.value[mt - FROM][nt][i] = acc.value[mt][nt][i];
}

// Stores a warp's sums, 16 tokens per iteration.
// Registers cannot be indexed, so accumulators shift, in
// groups to reduce the moves.
QG_DEVICE void store_warp(Accumulators& acc, const GemmParams& p, u32 first_token, u32 first_row, bool is_whole, WarpStaging& staging,
                          u32 lane) {
    constexpr u32 GROUP = M_TILES < 4 ? M_TILES : 4;
    u32 token = first_token;
#pragma unroll 1
    for (u32 group = 0; group < M_TILES / GROUP; group++) {
#pragma unroll 1
        for (u32 mt = 0; mt < GROUP; mt++, token += MMA_M) {
            if (token >= p.shape.m) return;
            store_token_rows<WARP_N, false>(reinterpret_cast<float*>(acc.value[0]), p, token, first_row, token_of(lane / 4), is_whole,
                                            staging, lane);
            move_up<1, GROUP>(acc);
        }
        move_up<GROUP, M_TILES>(acc);
    }
}

QG_DEVICE void consume(SharedStorage& shared, const BlockScaledParams& params, u32 thread) {
    // The shuffle makes `warp` uniform for the compiler.
    const u32 lane = thread % 32, warp = shfl_idx_u32(thread / 32, 0);
    const GemmParams& p = params.gemm;
    const LaneOffsets place = LaneOffsets::of(warp, lane);
    SchedulerState& state = shared.state[warp];
    SharedCopy<WorkList>::store(state.list, WorkList::of_cta(p), lane);
    Position at = {};
    while (SchedulerState::next(state, p, lane)) {
        Accumulators acc = {};
        u32 stages = SchedulerState::k_tiles(state), k = SharedCopy<WorkTile>::load(state.tile).begin;
#pragma unroll 1
        for (; stages > 0; stages--, k++) {
            mbarrier_wait(&shared.pipeline.full[at.stage], at.parity);
            multiply_stage(acc, shared.pipeline, at.stage, k % WORD_STAGES, place);
            Pipeline::release(shared.pipeline, at.stage, lane);
            Position::next(at);
        }
        const WorkTile work = SharedCopy<WorkTile>::load(state.tile);
        scale_tokens(acc, problem_of(params, work), work.m_tile * QG_TILE_M + warp % QG_WARPS_M * WARP_M + token_of(lane / 4));
        constexpr u32 COUNT = sizeof(acc) / 4;
        float* const all = reinterpret_cast<float*>(&acc);
        // MoE GEMM does not split K.
        if (!QG_EXPERT_TILES && work.peers > 1 && !add_token_row_partials<COUNT>(all, p, work, thread, &shared.last)) continue;
        // Reloaded: accumulators leave no registers for the tile.
        const WorkTile tile = SharedCopy<WorkTile>::load(state.tile);
        const u32 first_token = tile.m_tile * QG_TILE_M + warp % QG_WARPS_M * WARP_M;
        const u32 first_row = tile.n_tile * QG_TILE_N + warp / QG_WARPS_M * WARP_N;
        const bool is_whole = (tile.n_tile + 1) * QG_TILE_N <= rows_of_outputs(p);
        store_warp(acc, problem_of(p, tile), first_token, first_row, is_whole, shared.staging[warp], lane);
    }
}

extern "C" __global__ void __launch_bounds__(QG_THREADS, 1)
    qg_sm120_gemm_block_scaled_ws(const __grid_constant__ TmaBlockScaledParams params) {
    SharedStorage& shared = *reinterpret_cast<SharedStorage*>(dynamic_shared());
    const u32 thread = thread_index();
    if (thread == 0) Pipeline::init(shared.pipeline);
    cta_barrier();
    griddepcontrol_launch_dependents();
    using Registers = RegisterShares<40>;
    // The shuffle makes the role uniform for the compiler.
    if (shfl_idx_u32(thread / FIRST_PRODUCER, 0) == 0) {
        Registers::take();
        griddepcontrol_wait();
        consume(shared, params.x, thread);
    } else {
        Registers::give();
#if QG_EXPERT_TILES
        produce(shared.pipeline, params, thread - FIRST_PRODUCER, shared.faults);
#else
        produce(shared.pipeline, params, thread - FIRST_PRODUCER);
#endif
    }
}
