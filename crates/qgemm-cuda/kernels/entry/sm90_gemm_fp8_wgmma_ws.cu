// Warp-specialized FP8 and INT8 GEMM on Hopper.
// Consumer warpgroups multiply codes by `wgmma`, tokens as rows.
// Integer sums are exact.
// FP8 sums of 128 columns are scaled and added in f32.
// A producer warpgroup copies W and X by TMA.
#include "atoms/launch.cuh"
#include "atoms/sync.cuh"
#include "epilogue/token_lines_store.cuh"
#include "epilogue/token_rows_parts.cuh"
#include "mainloop/register_shares.cuh"
#if QG_INTEGERS
#include "mainloop/sm90/s8_product.cuh"
#elif QG_W_LINES
#include "mainloop/sm90/fp8_lines_product.cuh"
#else
#include "mainloop/sm90/fp8_product.cuh"
#endif
#include "mainloop/sm90/fp8_scales.cuh"
#include "mainloop/sm90/token_factors.cuh"

struct SharedStorage {
    Pipeline pipeline;
    union {
        WarpStaging staging[QG_CONSUMERS / 32];
        TokenLines<IS_LARGEST ? 2 : 1> lines[QG_CONSUMERS / 32];
    };
    WorkTileInfoRing infos;
    u32 last;
};
static_assert(sizeof(SharedStorage) == QG_SHARED_BYTES, "the host computes another size");
static_assert(QG_CONSUMERS % 128 == 0 && FIRST_PRODUCER == QG_CONSUMERS, "registers pass between whole warpgroups");

QG_DEVICE void consume(SharedStorage& shared, const TmaFp8GemmParams& params, u32 thread) {
    // The shuffle makes `warp` uniform for the compiler.
    const u32 lane = thread % 32, warp = shfl_idx_u32(thread / 32, 0);
    const GemmParams& p = params.fp8.gemm;
    const LaneOffsets place = LaneOffsets::of(warp, lane);
    Position at = {};
    u32 info = 0;
#pragma unroll 1
    for (;; info = WorkTileInfoRing::next(info)) {
        Position::wait_full(at, shared.pipeline);
        const WorkTile first = WorkTileInfo::read(shared.infos.info[info]);
        if (WorkTileInfoRing::is_end(first)) break;
        Accumulators sums;
        const u32 token = first_token_of(first);
        multiply_tile(sums, shared.pipeline, at, token < p.shape.m ? p.shape.m - token : 0, first, p, place, lane);
        // Reloaded: accumulators leave no registers for tile info.
        const WorkTile work = WorkTileInfo::read(shared.infos.info[info]);
        constexpr u32 COUNT = sizeof(sums) / 4, FEATURES = PARTS * PART_N;
        scale_tokens(sums, TokenFactors::load(params.fp8, first_token_of(work) + place.token));
        if (work.peers > 1 && !add_token_row_partials<COUNT>(reinterpret_cast<float*>(&sums), p, work, thread, &shared.last)) continue;
        auto acc = in_order(sums, lane);
        float* const all = reinterpret_cast<float*>(&acc);
        const u32 first_token = first_token_of(work) + place.token / 16 * 16;
        const u32 first_row = work.n_tile * QG_TILE_N + place.group_n * FEATURES;
        const bool is_whole = (work.n_tile + 1) * QG_TILE_N <= rows_of_outputs(p);
        if (is_whole && is_product(p))
            store_token_lines<FEATURES, ROWS_EXCHANGED>(all, p, first_token, first_row, shared.lines[warp], lane);
        else
            store_token_parts<FEATURES, ROWS_EXCHANGED>(all, p, first_token, first_row, place.token % 16, is_whole, shared.staging[warp],
                                                        lane);
    }
}

#if QG_CLUSTER > 1
extern "C" __global__ void QG_CLUSTER_OF(QG_CLUSTER) __launch_bounds__(QG_THREADS, 1)
#else
extern "C" __global__ void __launch_bounds__(QG_THREADS, 1)
#endif
    qg_sm90_gemm_fp8_wgmma_ws(const __grid_constant__ TmaFp8GemmParams params) {
    SharedStorage& shared = *reinterpret_cast<SharedStorage*>(dynamic_shared());
    const u32 thread = thread_index();
    if (thread == 0) Pipeline::init(shared.pipeline);
    meet_cluster();
    griddepcontrol_launch_dependents();
    using Registers = RegisterShares<32>;
    // The shuffle makes the role uniform for the compiler.
    if (shfl_idx_u32(thread / FIRST_PRODUCER, 0) == 0) {
        Registers::take();
        griddepcontrol_wait();
        consume(shared, params, thread);
    } else {
        Registers::give();
        if (thread == FIRST_PRODUCER) produce_x(shared.pipeline, shared.infos, params);
        if (thread == FIRST_PRODUCER + 32) produce_w(shared.pipeline, params);
        const u32 warp = shfl_idx_u32((thread - FIRST_PRODUCER) / 32, 0);
        if (HAS_BLOCK_SCALES && warp >= 2 && warp < 2 + SCALE_WARPS) produce_scales(shared.pipeline, params.fp8, warp - 2, thread % 32);
        warp_barrier();
    }
    if constexpr (QG_CLUSTER > 1) meet_cluster();
}
