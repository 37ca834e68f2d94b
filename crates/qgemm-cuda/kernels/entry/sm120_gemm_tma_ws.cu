// Warp-specialized GEMM with TMA and `mma.sync`, for larger M
// on Hopper and consumer Blackwell.
// A producer warpgroup copies W and X.
// Consumer warps only dequantize and multiply.
#include "atoms/launch.cuh"
#include "atoms/opaque_register.cuh"
#include "atoms/sync.cuh"
#include "epilogue/warp_store.cuh"
#include "mainloop/expert_producer.cuh"
#include "mainloop/scheduler_state.cuh"
#include "mainloop/register_shares.cuh"
#include "mainloop/tma_pipeline.cuh"
#include "mainloop/warp_tile.cuh"

struct SharedStorage {
    Pipeline pipeline;
    WarpStaging staging[QG_WARPS_N];
    SchedulerState state[QG_WARPS_N];
    u32 last;
#if QG_EXPERT_TILES
    u32 faults[8];
#endif
};
static_assert(sizeof(SharedStorage) == QG_SHARED_BYTES, "the host computes another size");
static_assert(QG_CONSUMERS == QG_WARPS_N * 32, "every warp that multiplies has rows of its own");
static_assert(STAGE_K_BLOCKS == 1 && !IN_LINES, "a stage is multiplied as a whole");

// acc += W · X over the next k-tile.
// `first` is the offset of the warp's rows in a stage of W.
// The barrier after a k-step stops the compiler from loading X
// for all k-steps at once, which would spill.
QG_DEVICE void multiply_k_tile(Accumulators& acc, Pipeline& pipeline, Position& at, const XCursor& cursor, u32 first,
                               u32 lane) {
    KTile k_tiles[ROW_TILES];
#pragma unroll
    for (u32 k_block = 0; k_block < K_BLOCKS; k_block++) {
        mbarrier_wait(&pipeline.full[at.x], at.parity);
#pragma unroll
        for (u32 rt = 0; rt < ROW_TILES; rt++) {
            const u8* k_tile = pipeline.w[at.w].tile[rt] + first;
            KTile::load_codes<FromShared>(k_tiles[rt], k_tile, k_block, lane);
            // Records of long k-tiles are reloaded per k-block.
            // Kept across k-blocks, they would cause spills.
            if (k_block == 0 || K_BLOCKS > 2) KTile::load_scales<FromShared>(k_tiles[rt], k_tile, lane);
        }
        accumulate_rounded(acc, k_tiles, k_block, pipeline.x[at.x][0], cursor, [](u32) { warp_barrier(); });
        Pipeline::release(pipeline, at.x, lane);
        Position::next_stage(at);
    }
    Position::next_run(at);
}

QG_DEVICE void consume(SharedStorage& shared, const GemmParams& p, u32 thread) {
    const u32 lane = thread % 32, warp = thread / 32;
    const XCursor cursor = {opaque_register(XCursor::of_lane(lane).offset)};
    const u32 first = opaque_register(warp * ROW_TILES * QG_K_TILE_BYTES);
    SchedulerState& state = shared.state[warp];
    SharedCopy<WorkList>::store(state.list, WorkList::of_cta(p), lane);
    Position at = {};
    while (SchedulerState::next(state, p, lane)) {
        Accumulators acc = {};
#pragma unroll 1
        for (u32 k_tiles = SchedulerState::k_tiles(state); k_tiles > 0; k_tiles--)
            multiply_k_tile(acc, shared.pipeline, at, cursor, first, lane);
        const WorkTile tile = SharedCopy<WorkTile>::load(state.tile);
        if (tile.peers > 1 && !add_partials(acc, p, tile, thread, &shared.last)) continue;
        // Reloaded: `add_partials` leaves no registers for the tile.
        const WorkTile work = SharedCopy<WorkTile>::load(state.tile);
        store_tile(acc, problem_of(p, work), work, shared.staging[warp], warp, lane);
    }
}

extern "C" __global__ void __launch_bounds__(QG_THREADS, QG_CTAS_PER_SM)
    qg_sm120_gemm_tma_ws(const __grid_constant__ TmaGemmParams params) {
    SharedStorage& shared = *reinterpret_cast<SharedStorage*>(dynamic_shared());
    const u32 thread = thread_index();
    if (thread == 0) Pipeline::init(shared.pipeline, stage_producers(params.gemm));
    cta_barrier();
    griddepcontrol_launch_dependents();
    using Registers = RegisterShares<(QG_EXPERT_TILES ? 40 : 24), QG_CTAS_PER_SM>;
    // The shuffle makes the role uniform for the compiler.
    if (shfl_idx_u32(thread / FIRST_PRODUCER, 0) == 0) {
        Registers::take();
        griddepcontrol_wait();
        consume(shared, params.gemm, thread);
    } else {
        Registers::give();
#if QG_EXPERT_TILES
        produce(shared.pipeline, params, thread - FIRST_PRODUCER, shared.faults);
#else
        produce(shared.pipeline, params, thread - FIRST_PRODUCER);
#endif
    }
}
