// D = A · B on Hopper, warp-specialized: E4M3 codes along K that TMA can read, with scales of blocks. CTAs stay and take work items in turn;
// while consumers store a tile, the producers fill the ring for the next.
#include "atoms/registers.cuh"
#include "epilogue/matmul_warpgroup_store.cuh"
#include "mainloop/sm90/matmul_wgmma_fp8.cuh"

struct SharedStorage {
    MatmulRing ring;
    WarpgroupStaging staging[CONSUMERS / 32];
    u32 last;
};
static_assert(sizeof(SharedStorage) == QG_SHARED_BYTES, "the host computes another size");

// With one warpgroup of consumers, threads start with as many registers as a thread can have.
constexpr bool PASS_REGISTERS = WARPGROUPS > 1;
constexpr u32 PRODUCER_REGISTERS = 40, CONSUMER_REGISTERS = 232;

QG_DEVICE void consume(SharedStorage& shared, const TmaMatmulParams& params, u32 thread) {
    const MatmulParams& p = params.matmul;
    const u32 lane = thread % 32, warp = shfl_idx_u32(thread / 32, 0);
    RingPosition at = {};
    for (u32 item = cta_index().x; item < params.work; item += grid_ctas().x) {
        const MatmulTile tile = MatmulTile::of(p, item % params.all_tiles, item / params.all_tiles);
        float acc[ACCUMULATORS] = {};
        multiply(acc, shared.ring, at, p, tile, thread, warp / 4, lane);
        if (p.tiles.splits > 1 && !add_matmul_partials<ACCUMULATORS, CONSUMERS>(acc, p, tile, thread, &shared.last))
            continue;
        store_matmul_rows(acc, p, tile.product, tile.row + warp * 16, tile.column, shared.staging[warp], lane);
    }
}

extern "C" __global__ void __launch_bounds__(QG_THREADS, QG_CTAS_PER_SM)
    qg_sm90_matmul_fp8_wgmma_ws(const __grid_constant__ TmaMatmulParams params) {
    SharedStorage& shared = *reinterpret_cast<SharedStorage*>(dynamic_shared());
    const u32 thread = thread_index();
    if (thread == 0) MatmulRing::init(shared.ring);
    cta_barrier();
    griddepcontrol_launch_dependents();
    griddepcontrol_wait();
    // The shuffle tells the compiler that the role is the same for the whole warp.
    if (shfl_idx_u32(thread / CONSUMERS, 0) == 0) {
        if constexpr (PASS_REGISTERS) setmaxnreg_inc<CONSUMER_REGISTERS>();
        consume(shared, params, thread);
    } else {
        if constexpr (PASS_REGISTERS) setmaxnreg_dec<PRODUCER_REGISTERS>();
        const u32 warp = shfl_idx_u32((thread - CONSUMERS) / 32, 0);
        if (thread == CONSUMERS) produce_codes(shared.ring, params);
        if (warp > 0) produce_scales(shared.ring, params, warp - 1, thread % 32);
    }
}
