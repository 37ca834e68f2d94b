// D[m, n] for any number of tokens on matrix instructions, Ampere and Ada: W and X pass through rings of shared memory
// that asynchronous copies fill; weights are made from their codes in registers, on the way to the instruction.
#include "atoms/launch.cuh"
#include "atoms/sync.cuh"
#include "epilogue/warp_store.cuh"
#include "mainloop/sm80/cp_async_producer.cuh"
#include "mainloop/warp_tile.cuh"

struct SharedStorage {
    Pipeline pipeline;
    WarpStaging staging[QG_WARPS_N];
#if QG_PARKS_STATE
    KeptWork work[QG_WARPS_N];
#endif
    u32 last;
};
static_assert(sizeof(SharedStorage) == QG_SHARED_BYTES, "the host computes another size");
static_assert(QG_WARPS_N * 32 == QG_THREADS, "every warp has rows of its own");

template <class Between>
QG_DEVICE void accumulate(Sums& sums, const WStage& w, u32 warp, u32 chunk, Slab (&slabs)[ROW_TILES], const XStage& x,
                          const XCursor& cursor, u32 lane, Between between) {
#pragma unroll
    for (u32 rt = 0; rt < ROW_TILES; rt++) {
        const u8* slab = w.slab[warp * ROW_TILES + rt];
        Slab::load_codes<FromShared>(slabs[rt], slab, chunk, lane);
        if (chunk == 0) Slab::load_scales<FromShared>(slabs[rt], slab, lane);
    }
    accumulate_rounded(sums, slabs, chunk, x, cursor, between);
}

extern "C" __global__ void __launch_bounds__(QG_THREADS, QG_CTAS_PER_SM)
    qg_sm80_gemm_cp_async(const __grid_constant__ GemmParams p) {
    SharedStorage& shared = *reinterpret_cast<SharedStorage*>(dynamic_shared());
    Pipeline& pipeline = shared.pipeline;
    const u32 thread = thread_index(), lane = thread % 32, warp = thread / 32;
    if (thread == 0) Pipeline::init(pipeline);
    block_barrier();

#if QG_PARKS_STATE
    KeptWork& kept = shared.work[warp];
#else
    KeptWork kept;
#endif
    Feeder feeder = Feeder::start(p, pipeline, kept.ahead, thread);
#pragma unroll
    for (u32 i = 0; i < AHEAD; i++) Feeder::copy(feeder, pipeline, kept.ahead, p, i % CHUNKS, i, thread);

    const XCursor cursor = XCursor::of_lane(lane);
    Kept<WorkList>::put(kept.list, WorkList::of_block(p), lane);
    Position at = {};
    while (KeptWork::next(kept, p, lane)) {
        Sums sums = {};
#pragma unroll 1
        for (u32 slab = KeptWork::slabs(kept); slab > 0; slab--) {
            Slab slabs[ROW_TILES];
#pragma unroll
            for (u32 chunk = 0; chunk < CHUNKS; chunk++) {
                mbarrier_wait(&pipeline.full[at.x], at.parity);
                accumulate(sums, pipeline.w[at.w], warp, chunk, slabs, pipeline.x[at.x], cursor, lane, [&](u32 step) {
                    // In one piece: compilers move nothing across a branch, and matrix instructions wait for what stands there.
                    if (step != 0) return;
                    const XPosition free = Position::two_chunks_ago(at);
                    mbarrier_wait(&pipeline.empty[free.x], free.parity);
                    Feeder::copy(feeder, pipeline, kept.ahead, p, (chunk + AHEAD) % CHUNKS, free.x, thread);
                });
                warp_barrier();
                if (lane == 0) mbarrier_arrive(&pipeline.empty[at.x]);
                Position::next_chunk(at);
            }
            Position::next_slab(at);
        }
        const TileWork work = Kept<TileWork>::take(kept.tile);
        if (work.contributors > 1 && !add_partial_sums(sums, p, work, thread, &shared.last)) continue;
        store_tile(sums, p, work, shared.staging[warp], warp, lane);
    }
}
