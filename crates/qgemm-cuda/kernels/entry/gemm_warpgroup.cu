// D[m, n] for more than a few tokens on Hopper: warpgroups make weights from their codes in registers and multiply them with
// X in shared memory by instructions that run by themselves; a warp of its own keeps W and X coming.
#include "atoms/launch.cuh"
#include "atoms/sync.cuh"
#include "mainloop/warpgroup_pipeline.cuh"
#include "mainloop/warpgroup_tile.cuh"
#include "epilogue/warp_store.cuh"

struct SharedStorage {
    Pipeline pipeline;
    WarpStaging staging[QG_WARPS_N];
    u32 last;
};
static_assert(sizeof(SharedStorage) == QG_SHARED_BYTES, "the host computes another size");
static_assert(QG_CONSUMERS == QG_WARPS_N * 32 && QG_CONSUMERS % 128 == 0, "warpgroups");
static_assert(QG_THREADS == QG_CONSUMERS + 128, "and one that feeds them, for registers pass between warpgroups");

// Registers of a feeding thread and of one that multiplies: 65536 for all threads of an SM.
constexpr u32 FEEDER_REGISTERS = QG_BLOCKS_PER_SM == 1 ? 40 : 32;
constexpr u32 CONSUMER_REGISTERS = (65536 / QG_BLOCKS_PER_SM - FEEDER_REGISTERS * 128) / QG_CONSUMERS / 8 * 8;

// Gives a stage back to the feeding warp.
QG_DEVICE void release(Pipeline& pipeline, u32 stage, u32 lane) {
    warp_barrier();
    if (lane == 0) mbarrier_arrive(&pipeline.empty[stage]);
}

QG_DEVICE void consume(SharedStorage& shared, const GemmParams& p, u32 thread) {
    Pipeline& pipeline = shared.pipeline;
    const u32 lane = thread % 32, warp = thread / 32;
    TileWork work;
    WorkList list = WorkList::of_block(p);
    Position at = {};
    while (WorkList::next(list, p, work)) {
        Sums sums = {};
        StepOperands operands;
        // The stage that instructions under way still read, beyond the last where there is none.
        u32 read = QG_X_STAGES;
#pragma unroll 1
        for (u32 slab = work.end - work.begin; slab > 0; slab--) {
            Slab slabs[ROW_TILES];
#pragma unroll
            for (u32 chunk = 0; chunk < CHUNKS; chunk++) {
                mbarrier_wait(&pipeline.full[at.x], at.parity);
#pragma unroll
                for (u32 rt = 0; rt < ROW_TILES; rt++) {
                    const u8* tile = pipeline.w[at.w].slab[warp * ROW_TILES + rt];
                    Slab::load_codes<FromShared>(slabs[rt], tile, chunk, lane);
                    if (chunk == 0) Slab::load_scales<FromShared>(slabs[rt], tile, lane);
                }
                multiply_chunk(sums, operands, slabs, chunk, pipeline.x[at.x], [&] {
                    if (read < QG_X_STAGES) release(pipeline, read, lane);
                });
                read = at.x;
                Position::next_chunk(at);
            }
            Position::next_slab(at);
        }
        wgmma_wait_group<0>();
        release(pipeline, read, lane);
        if (work.contributors > 1 && !add_partial_sums(sums, p, work, thread, &shared.last)) continue;
        store_tile(sums, p, work, shared.staging[warp], warp, lane);
    }
}

extern "C" __global__ void __launch_bounds__(QG_THREADS, QG_BLOCKS_PER_SM)
    qg_gemm_warpgroup(const __grid_constant__ FedGemmParams params) {
    SharedStorage& shared = *reinterpret_cast<SharedStorage*>(dynamic_shared());
    const u32 thread = thread_index();
    if (thread == 0) Pipeline::init(shared.pipeline);
    block_barrier();
    griddepcontrol_launch_dependents();
    griddepcontrol_wait();
    if (thread < QG_CONSUMERS) {
        setmaxnreg_inc<CONSUMER_REGISTERS>();
        consume(shared, params.gemm, thread);
    } else {
        setmaxnreg_dec<FEEDER_REGISTERS>();
        if (thread < QG_CONSUMERS + 32) feed(shared.pipeline, params, thread % 32);
    }
}
