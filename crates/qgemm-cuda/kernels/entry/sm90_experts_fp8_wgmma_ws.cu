// Warp-specialized FP8 MoE GEMM on Hopper:
// sm90_gemm_fp8_wgmma_ws with a persistent grid over the tiles
// of all experts. K is not split.
#include "atoms/launch.cuh"
#include "atoms/sync.cuh"
#include "epilogue/token_lines_store.cuh"
#include "mainloop/register_shares.cuh"
#include "mainloop/sm90/fp8_expert_producer.cuh"
#if QG_W_LINES
#include "mainloop/sm90/fp8_lines_product.cuh"
#else
#include "mainloop/sm90/fp8_product.cuh"
#endif
#include "mainloop/sm90/token_factors.cuh"

struct SharedStorage {
    Pipeline pipeline;
    union {
        WarpStaging staging[QG_CONSUMERS / 32];
        TokenLines<IS_LARGEST ? 2 : 1> lines[QG_CONSUMERS / 32];
    };
    WorkTileInfoRing infos;
    u32 faults[8];
};
static_assert(sizeof(SharedStorage) == QG_SHARED_BYTES, "the host computes another size");
static_assert(QG_CONSUMERS % 128 == 0 && FIRST_PRODUCER == QG_CONSUMERS, "registers pass between whole warpgroups");

// Releases the stages of a tile without reading them.
QG_DEVICE void pass_stages(Pipeline& pipeline, Position& at, u32 count, u32 lane) {
#pragma unroll 1
    for (; count > 0; count--) {
        Position::wait_full(at, pipeline);
        Pipeline::release(pipeline, Position::stage(at), lane);
        Position::next(at);
    }
}

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
        const u32 stages = first.end - first.begin;
        if (warp / 4 % GROUPS_M * 64 >= first.own.rows) {
            // Last tile of an expert: this warpgroup has no tokens.
            pass_stages(shared.pipeline, at, stages, lane);
            continue;
        }
        Accumulators sums;
        multiply_tile(sums, shared.pipeline, at, first.own.rows, first, p, place, lane);
        // Reloaded: accumulators leave no registers for tile info.
        const WorkTile work = WorkTileInfo::read(shared.infos.info[info]);
        if constexpr (!QG_X_BLOCK_SCALES) scale_tokens(sums, TokenFactors::load(problem_of(params.fp8, work.own), place.token));
        constexpr u32 FEATURES = PARTS * PART_N;
        const u32 first_token = place.token / 16 * 16, first_row = work.n_tile * QG_TILE_N + place.group_n * FEATURES;
        const bool is_whole = (work.n_tile + 1) * QG_TILE_N <= rows_of_outputs(p);
        auto acc = in_order(sums, lane);
        float* const all = reinterpret_cast<float*>(&acc);
        const GemmParams own = problem_of(p, work);
        if (is_whole && p.groups.list == 0 && is_product(p))
            store_token_lines<FEATURES, ROWS_EXCHANGED>(all, own, first_token, first_row, shared.lines[warp], lane);
        else
            store_token_rows<FEATURES, ROWS_EXCHANGED>(all, own, first_token, first_row, place.token % 16, is_whole, shared.staging[warp],
                                                       lane);
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
    // The tile search needs registers.
    using Registers = RegisterShares<40>;
    // The shuffle makes the role uniform for the compiler.
    if (shfl_idx_u32(thread / FIRST_PRODUCER, 0) == 0) {
        Registers::take();
        griddepcontrol_wait();
        consume(shared, params, thread);
    } else {
        Registers::give();
        produce_experts(shared.pipeline, shared.infos, params, thread - FIRST_PRODUCER, shared.faults);
        warp_barrier();
    }
    if constexpr (QG_CLUSTER > 1) meet_cluster();
}
