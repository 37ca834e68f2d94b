// GEMM on MMA with `cp.async` rings, Ampere and Ada, any M.
// Warps dequantize W in registers, right before its MMA.
#include "atoms/launch.cuh"
#include "atoms/sync.cuh"
#include "epilogue/warp_store.cuh"
#include "mainloop/sm80/cp_async_producer.cuh"
#include "mainloop/warp_tile.cuh"
#include "sched/experts.cuh"

struct SharedStorage {
    Pipeline pipeline;
    WarpStaging staging[QG_WARPS_N];
#if QG_STATE_IN_SHARED
    SchedulerState state[QG_WARPS_N];
#endif
    u32 last;
};
static_assert(sizeof(SharedStorage) == QG_SHARED_BYTES, "the host computes another size");
static_assert(QG_WARPS_N * 32 == QG_THREADS, "every warp has rows of its own");

template <class PerKStep>
QG_DEVICE void accumulate(Accumulators& acc, const WStage& w, u32 warp, u32 k_block, KTile (&k_tiles)[ROW_TILES],
                          const XStage& x, const XCursor& cursor, u32 lane, PerKStep per_k_step) {
#pragma unroll
    for (u32 rt = 0; rt < ROW_TILES; rt++) {
        const u8* k_tile = w.k_tile[warp * ROW_TILES + rt];
        KTile::load_codes<FromShared>(k_tiles[rt], k_tile, k_block, lane);
        if (k_block == 0) KTile::load_scales<FromShared>(k_tiles[rt], k_tile, lane);
    }
    accumulate_rounded(acc, k_tiles, k_block, x, cursor, per_k_step);
}

extern "C" __global__ void __launch_bounds__(QG_THREADS, QG_CTAS_PER_SM)
    qg_sm80_gemm_cp_async(const __grid_constant__ KernelParams given) {
    QG_TAKE_PROBLEM(p, given);
    SharedStorage& shared = *reinterpret_cast<SharedStorage*>(dynamic_shared());
    Pipeline& pipeline = shared.pipeline;
    const u32 thread = thread_index(), lane = thread % 32, warp = thread / 32;
    if (thread == 0) Pipeline::init(pipeline);
    cta_barrier();

#if QG_STATE_IN_SHARED
    SchedulerState& state = shared.state[warp];
#else
    SchedulerState state;
#endif
    Producer producer = Producer::start(p, pipeline, state.producer_list, thread);
#pragma unroll
    for (u32 i = 0; i < PREFETCH_DISTANCE; i++)
        Producer::copy(producer, pipeline, state.producer_list, p, i % K_BLOCKS, i, thread);

    const XCursor cursor = XCursor::of_lane(lane);
    SharedCopy<WorkList>::store(state.list, WorkList::of_cta(p), lane);
    Position at = {};
    while (SchedulerState::next(state, p, lane)) {
        Accumulators acc = {};
#pragma unroll 1
        for (u32 k_tile = SchedulerState::k_tiles(state); k_tile > 0; k_tile--) {
            KTile k_tiles[ROW_TILES];
#pragma unroll
            for (u32 k_block = 0; k_block < K_BLOCKS; k_block++) {
                mbarrier_wait(&pipeline.full[at.x], at.parity);
                const auto per_k_step = [&](u32 k_step) {
                    // All copies are issued after the first k-step.
                    // Compilers move nothing across the branch, so later MMAs
                    // wait for its code.
                    if (k_step != 0) return;
                    const XPosition free = Position::two_k_blocks_ago(at);
                    mbarrier_wait(&pipeline.empty[free.x], free.parity);
                    Producer::copy(producer, pipeline, state.producer_list, p, (k_block + PREFETCH_DISTANCE) % K_BLOCKS,
                                   free.x, thread);
                };
                accumulate(acc, pipeline.w[at.w], warp, k_block, k_tiles, pipeline.x[at.x], cursor, lane, per_k_step);
                warp_barrier();
                if (lane == 0) mbarrier_arrive(&pipeline.empty[at.x]);
                Position::next_k_block(at);
            }
            Position::next_k_tile(at);
        }
        const WorkTile work = SharedCopy<WorkTile>::load(state.tile);
        if (work.peers > 1 && !add_partials(acc, p, work, thread, &shared.last)) continue;
#if QG_SEGMENT_TILES
        store_tile(acc, problem_of(p, work), work, shared.staging[warp], warp, lane);
#else
        store_tile(acc, p, work, shared.staging[warp], warp, lane);
#endif
    }
}
