// s8 GEMM on integer MMA with `cp.async` rings, Ampere
// and newer, any M.
// Codes of W become s8 in registers.
#include "atoms/launch.cuh"
#include "atoms/sync.cuh"
#include "epilogue/warp_store.cuh"
#include "mainloop/signed_byte_tile.cuh"
#include "mainloop/sm80/signed_byte_producer.cuh"

struct SharedStorage {
    BytePipeline pipeline;
    WarpStaging staging[QG_WARPS_N];
    SchedulerState state[QG_WARPS_N];
    u32 last;
};
static_assert(sizeof(SharedStorage) == QG_SHARED_BYTES, "the host computes another size");
static_assert(QG_WARPS_N * 32 == QG_THREADS, "every warp has rows of its own");

extern "C" __global__ void __launch_bounds__(QG_THREADS, QG_CTAS_PER_SM)
    qg_sm80_gemm_s8_cp_async(const __grid_constant__ SignedByteParams launched) {
    QG_TAKE_BYTES(given, launched);
    const GemmParams& p = given.gemm;
    SharedStorage& shared = *reinterpret_cast<SharedStorage*>(dynamic_shared());
    BytePipeline& pipeline = shared.pipeline;
    const u32 thread = thread_index(), lane = thread % 32, warp = thread / 32;
    if (thread == 0) BytePipeline::init(pipeline);
    cta_barrier();
    griddepcontrol_launch_dependents();
    griddepcontrol_wait();

    SchedulerState& state = shared.state[warp];
    ByteProducer producer;
    ByteProducer::start(producer, p, pipeline, state.producer_list, thread);
#pragma unroll
    for (u32 i = 0; i < BYTE_PREFETCH; i++)
        ByteProducer::copy(producer, pipeline, state.producer_list, given, i % RUN_STAGES, i, thread);
    ByteProducer::make_ready(producer, pipeline, 0, thread);

    const ByteCursor cursor = ByteCursor::of_lane(lane);
    // Always 0: M is below 2^31. Opaque to the compiler.
    const u32 none = opaque_register(p.shape.m >> 31);
    const SumZero zero = SumZero::make();
    SharedCopy<WorkList>::store(state.list, WorkList::of_cta(p), lane);
    BytePosition at = {};
    while (SchedulerState::next(state, p, lane)) {
        Accumulators acc = {};
#pragma unroll 1
        for (u32 run = (SchedulerState::k_tiles(state) + RUN_K_TILES - 1) / RUN_K_TILES; run > 0; run--) {
            KTile k_tiles[ROW_TILES];
#pragma unroll
            for (u32 part = 0; part < RUN_STAGES; part++) {
                mbarrier_wait(&pipeline.full[at.x], at.parity);
                const u32 free = BytePosition::free_stage(at);
                mbarrier_wait(&pipeline.empty[free], BytePosition::free_parity(at));
                ByteProducer::copy(producer, pipeline, state.producer_list, given, (part + BYTE_PREFETCH) % RUN_STAGES, free,
                                   thread);
                ByteProducer::make_ready(producer, pipeline, BytePosition::next_stage(at), thread);
#pragma unroll
                for (u32 i = 0; i < STAGE_K_BLOCKS; i++) {
                    const u32 of_run = part * STAGE_K_BLOCKS + i, k_block = of_run % K_BLOCKS;
                    // Without it W of both k-blocks is loaded first, which spills.
                    if (i > 0) warp_barrier();
                    ByteRows rows[ROW_TILES];
#pragma unroll
                    for (u32 rt = 0; rt < ROW_TILES; rt++) {
                        const u8* tile = pipeline.w[at.w].k_tile[warp * ROW_TILES + rt] + of_run / K_BLOCKS * QG_K_TILE_BYTES;
                        KTile::load_codes<FromShared>(k_tiles[rt], tile, k_block, lane);
                        // Records of long k-tiles are reloaded per k-block.
                        // Kept across k-blocks, they would cause spills.
                        if (k_block == 0 || K_BLOCKS > 2) KTile::load_scales<FromShared>(k_tiles[rt], tile, lane);
                        ByteRows::load(rows[rt], k_tiles[rt], k_block, lane, none);
                    }
                    accumulate_bytes(acc, rows, pipeline.x[at.x], i, cursor, zero, lane, none);
                }
                warp_barrier();
                if (lane == 0) mbarrier_arrive(&pipeline.empty[at.x]);
                BytePosition::next(at);
            }
            BytePosition::next_run(at);
        }
        const WorkTile work = SharedCopy<WorkTile>::load(state.tile);
        if (work.peers > 1 && !add_partials(acc, p, work, thread, &shared.last)) continue;
        if constexpr (QG_EXPERTS && !QG_X_BLOCK_SCALES) scale_tokens(acc, given, lane);
        store_tile(acc, p, work, shared.staging[warp], warp, lane);
    }
}
