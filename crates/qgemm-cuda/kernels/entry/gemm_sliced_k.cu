// Sliced-K GEMM on MMA for few tokens, Ampere and newer.
// Slices of a CTA's warps split the K of the CTA's rows.
// Each warp has a ring of its W k-tiles, each slice a ring
// of its X columns.
// Slices do not wait for each other before the end.
// The kernel is memory-bound.
// If X is normalized, all of it is in shared memory
// before the main loop.
#include "atoms/launch.cuh"
#include "epilogue/sliced_k.cuh"
#include "mainloop/k_tile_product.cuh"
#include "mainloop/w_warp_ring.cuh"
#include "sched/early_experts.cuh"
#include "sched/projection.cuh"
#if QG_RESIDENT_X
#include "mainloop/resident_x.cuh"
#else
#include "mainloop/x_slice_ring.cuh"
#endif

// W ring of a warp, reused for its accumulators.
struct KTilesOrAccumulators {
    union {
        WWarpRing ring;
        WarpAccumulators acc;
    };
};
struct WarpMemory : KTilesOrAccumulators, ScaleTableOfWarp {};
struct SharedStorage {
#if QG_OPERAND_TABLE
    OperandTable operands;
#endif
#if QG_RESIDENT_X
    ResidentX x;
#else
    XSliceRing x[SLICES];
#endif
    WarpMemory w[QG_THREADS / 32];
    u32 last;
};
static_assert(sizeof(SharedStorage) == QG_SHARED_BYTES, "the host computes another size");
static_assert(QG_STAGES >= 2, "at least one stage is in flight");

// K-tiles in flight during the MMA of one.
constexpr u32 PREFETCH_DISTANCE = QG_STAGES - 1;

extern "C" __global__ void __launch_bounds__(QG_THREADS, QG_CTAS_PER_SM)
    qg_gemm_sliced_k(const __grid_constant__ KernelParams given) {
    QG_TAKE_PROBLEM_EARLY(p, given);
    SharedStorage& shared = *reinterpret_cast<SharedStorage*>(dynamic_shared());
    const u32 thread = thread_index(), lane = thread % 32;
    const u32 slice = thread / SLICE_THREADS, slice_thread = thread % SLICE_THREADS, warp = slice_thread / 32;
    const WorkTile work = WorkTile::of_grid(p);
#if !QG_RESIDENT_X
    XSliceRing& x_ring = shared.x[slice];
#endif
    WWarpRing& w_ring = shared.w[thread / 32].ring;

    u32 k_tile = work.begin + slice;
    WSource w = WSource::of(p, w_ring, (work.n_tile * QG_WARPS_N + warp) * ROW_TILES, k_tile, lane);
    // Weights first: they come from memory.
    // All CTAs share X, which comes from L2.
#pragma unroll
    for (u32 i = 0; i < PREFETCH_DISTANCE; i++)
        if (k_tile + i * SLICES < work.end) WSource::copy(w, i, SLICES, lane);
#if QG_OPERAND_TABLE
    OperandTable::make(shared.operands, thread);
    cta_barrier();
#endif
#if QG_RESIDENT_X
    ResidentX::fill(shared.x, p, work.m_tile * QG_TILE_M, thread);
#pragma unroll
    for (u32 i = 0; i < PREFETCH_DISTANCE; i++) cp_async_commit_group();
#else
    XSliceSource x = XSliceSource::of(p, x_ring, work.m_tile * QG_TILE_M, k_tile, slice_thread);
    griddepcontrol_wait();
    // Not earlier: CTAs of the kernel after the next
    // would take SM slots.
    // CTAs of the next kernel, a norm, would then spread unevenly.
    griddepcontrol_launch_dependents();
#pragma unroll
    for (u32 i = 0; i < PREFETCH_DISTANCE; i++) {
        const u32 next = k_tile + i * SLICES;
        if (next < work.end) XSliceSource::copy(x, p, next, i, SLICES, slice_thread);
        cp_async_commit_group();
    }
#endif

    const XCursor cursor = XCursor::of_lane_in_k_steps(lane);
    const Constants constants = Constants::make(lane);
    Accumulators acc = {};
    u32 at = 0;
#pragma unroll 1
    for (; k_tile < work.end; k_tile += SLICES) {
        cp_async_wait_group<PREFETCH_DISTANCE - 1>();
#if QG_RESIDENT_X
        warp_barrier();
#else
        slice_barrier(slice);
#endif
        // The next k-tile overwrites the previous one.
        const u32 next = k_tile + PREFETCH_DISTANCE * SLICES, free = at == 0 ? QG_STAGES - 1 : at - 1;
        if (next < work.end) {
            WSource::copy(w, free, SLICES, lane);
#if !QG_RESIDENT_X
            XSliceSource::copy(x, p, next, free, SLICES, slice_thread);
#endif
        }
        cp_async_commit_group();
#if QG_RESIDENT_X
        const XStage* const columns = &shared.x.k_block[k_tile * K_BLOCKS];
        multiply_k_tile(acc, w_ring.k_tiles[at].tile, columns, cursor, constants, shared.w[thread / 32], lane);
#else
        multiply_k_tile(acc, w_ring.k_tiles[at].tile, x_ring.k_tile[at].k_block, cursor, constants,
                        shared.w[thread / 32], lane);
#endif
        at = at + 1 == QG_STAGES ? 0 : at + 1;
    }

    // The accumulators overwrite the warp's k-tiles, all of which
    // have arrived and been read.
    warp_barrier();
    WarpAccumulators& own = shared.w[thread / 32].acc;
    for_each_accumulator(acc, lane,
                         [&](u32 row, u32 token, float value) { WarpAccumulators::put(own, row, token, value); });
    const bool products = are_products(p);
    cta_barrier();
    store_sliced_k(p, products, &shared.last, thread,
                   [&](u32 i) -> const WarpAccumulators& { return shared.w[i].acc; });
}
