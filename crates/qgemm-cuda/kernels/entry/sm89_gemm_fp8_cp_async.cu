// FP8 GEMM on `mma.sync`, Ada and consumer Blackwell.
// W is E4M3 or E5M2, X is E4M3; neither is decoded.
// All threads copy stages of 128 columns by `cp.async`.
// Tokens are MMA rows.
#include "atoms/launch.cuh"
#include "atoms/sync.cuh"
#include "epilogue/token_rows_store.cuh"
#include "mainloop/sm89/fp8_problem.cuh"
#include "mainloop/sm89/fp8_stages.cuh"

struct SharedStorage {
    Stage stage[QG_STAGES];
    WarpStaging staging[QG_THREADS / 32];
    u32 last;
};
static_assert(sizeof(SharedStorage) == QG_SHARED_BYTES, "the host computes another size");

// acc = X · Wᵀ over the stages of a work tile.
QG_DEVICE void multiply_tile(Accumulators& acc, SharedStorage& shared, const Fp8GemmParams& params, const WorkTile& work,
                             u32 token, u32 row, u32 thread) {
    const u32 first_token = work.m_tile * QG_TILE_M, first_row = work.n_tile * QG_TILE_N;
    const u32 tokens = params.gemm.shape.m - first_token;
    acc = {};
    // Every thread has read the previous tile's stages.
    cta_barrier();
#pragma unroll
    for (u32 i = 0; i + 1 < QG_STAGES; i++) {
        if (work.begin + i < work.end)
            Stage::copy(shared.stage[i], params, first_token, first_row, work.begin + i, thread);
        cp_async_commit_group();
    }
    u32 at = 0, next = QG_STAGES - 1;
#pragma unroll 1
    for (u32 k = work.begin; k < work.end; k++) {
        cp_async_wait_group<QG_STAGES - 2>();
        cta_barrier();
        // All threads have read this stage before the barrier.
        if (k + QG_STAGES - 1 < work.end)
            Stage::copy(shared.stage[next], params, first_token, first_row, k + QG_STAGES - 1, thread);
        cp_async_commit_group();
        multiply_stage(acc, shared.stage[at], token, tokens, row, thread % 32);
        if (++at == QG_STAGES) at = 0;
        if (++next == QG_STAGES) next = 0;
    }
    if constexpr (!QG_X_BLOCK_SCALES) {
#pragma unroll
        for (u32 mt = 0; mt < M_TILES; mt++) {
            float factor[2];
            load_token_factors(factor, params, first_token + token + mt * MMA_M);
#pragma unroll
            for (u32 nt = 0; nt < N_TILES; nt++)
#pragma unroll
                for (u32 i = 0; i < 4; i++) acc.value[mt][nt][i] *= factor[i / 2];
        }
    }
}

extern "C" __global__ void __launch_bounds__(QG_THREADS, 1)
    qg_sm89_gemm_fp8_cp_async(const __grid_constant__ Fp8GemmParams params) {
    SharedStorage& shared = *reinterpret_cast<SharedStorage*>(dynamic_shared());
    const GemmParams& p = params.gemm;
    const u32 thread = thread_index(), lane = thread % 32, warp = thread / 32;
    const u32 token = warp % QG_WARPS_M * WARP_M + token_of(lane / 4), row = warp / QG_WARPS_M * WARP_N;
    griddepcontrol_launch_dependents();
    griddepcontrol_wait();
    WorkList list = WorkList::of_cta(p);
    WorkTile work;
    while (WorkList::next(list, p, work)) {
        const Fp8Problem own = problem_of(params, work);
        Accumulators acc;
        multiply_tile(acc, shared, own, work, token, row, thread);
        constexpr u32 COUNT = sizeof(acc) / 4;
        // MoE GEMM does not split K.
        if (!QG_EXPERT_TILES && work.peers > 1 &&
            !add_token_row_partials<COUNT>(reinterpret_cast<float*>(&acc), p, work, thread, &shared.last))
            continue;
        const u32 first_token = work.m_tile * QG_TILE_M + warp % QG_WARPS_M * WARP_M;
        const bool is_whole = (work.n_tile + 1) * QG_TILE_N <= rows_of_outputs(p);
#pragma unroll
        for (u32 mt = 0; mt < M_TILES; mt++)
            store_token_rows<WARP_N, false>(reinterpret_cast<float*>(acc.value[mt]), own.gemm, first_token + mt * MMA_M,
                                     work.n_tile * QG_TILE_N + row, token % 8, is_whole, shared.staging[warp], lane);
    }
#if QG_EXPERT_TILES
    // The last CTA has the fewest tiles.
    if (cta_index().x + 1 != grid_ctas().x) return;
    cta_barrier();
    store_faults<QG_THREADS>(p.groups, reinterpret_cast<u32*>(shared.staging), thread, [] { cta_barrier(); });
#endif
}
