// GEMM on MMA without async copies (Volta, Turing), any M.
// Each warp owns rows of W and loads them directly to registers.
// X passes through registers to two stages of shared memory.
// W and X are loaded one stage of 64 columns ahead.
#include "atoms/launch.cuh"
#if QG_X_PLANES && QG_MMA_M8N8K4
#include "mainloop/sm70/dp4a_k_block.cuh"
#elif QG_X_PLANES
#include "mainloop/sm70/m8n8k16_k_block.cuh"
#elif QG_MMA_M8N8K4
#include "mainloop/sm70/m8n8k4_k_block.cuh"
#else
#include "mainloop/sm70/m16n8k8_k_block.cuh"
#endif
#include "atoms/sync.cuh"
#include "epilogue/store.cuh"
#include "sched/experts.cuh"
#include "sched/split.cuh"

constexpr u32 WARPS = QG_THREADS / 32;
constexpr u32 TILE_N = WARPS * WARP_ROWS;
constexpr u32 ELEMENTS = TILE_N * QG_TILE_M;
// Four words of padding:
// the tokens of a warp's lanes use different banks.
constexpr u32 ACC_PITCH = TILE_N + 4;

struct Stage {
    XRows x;
    WScales w[WARPS];
};
struct SharedStorage {
    union {
        Stage stage[2];
        float acc[QG_TILE_M * ACC_PITCH];  // [token][row of W], swizzled
    };
    u32 last;
};
static_assert(sizeof(SharedStorage) == QG_SHARED_BYTES, "the host computes another size");

// Multiplies the k-tiles of the work tile.
// Afterwards shared memory is free.
QG_DEVICE void multiply(Accumulators& acc, SharedStorage& shared, const GemmParams& p, const XSource& x_source,
                        const WorkTile& work) {
    const u32 thread = thread_index(), lane = thread % 32, warp = thread / 32;
    const u32 first_token = work.m_tile * QG_TILE_M;
    WStream w;
    KTile k_tiles[ROW_TILES];
    XStream x;
    const u32 first_stage = work.begin * K_TILE_STAGES, stages = work.end * K_TILE_STAGES - first_stage;
    WStream::begin(w, p, (work.n_tile * WARPS + warp) * ROW_TILES, work.begin);
    WStream::load(w, 0, lane);
    XStream::begin(x, x_source, first_token, first_stage, thread);
    XStream::load(x, x_source, first_token, first_stage, thread);
#pragma unroll 1
    for (u32 at = 0; at < stages * STAGE_K_BLOCKS; at++) {
        const u32 done = at / STAGE_K_BLOCKS, k_block = at % STAGE_K_BLOCKS;
        Stage& stage = shared.stage[done % 2];
        if (k_block == 0) {
            XStream::store(stage.x, x, thread);
            WStream::store_scales(stage.w[warp], w, done % K_TILE_STAGES, lane);
            cta_barrier();
        }
        WStream::take(k_tiles, w, at % (K_TILE_STAGES * STAGE_K_BLOCKS));
        // The stage's last codes are taken: load the next stage.
        if (k_block + 1 == STAGE_K_BLOCKS && done + 1 < stages) {
            if ((done + 1) % K_TILE_STAGES == 0) WStream::next_k_tile(w);
            WStream::load(w, (done + 1) % K_TILE_STAGES, lane);
            XStream::load(x, x_source, first_token, first_stage + done + 1, thread);
        }
        Engine::accumulate(acc, k_tiles, stage.x, stage.w[warp], k_block, lane);
    }
    cta_barrier();
}

// Position of an accumulator of the tile.
// Swizzle: each 32 rows of 128 order their words of four
// rows differently. Lanes that read runs of eight rows
// reach all banks.
QG_DEVICE u32 accumulator_place(u32 token, u32 row) {
    return token * ACC_PITCH + (row ^ row / 32 % 4 * 4);
}

// A run of eight rows of one token.
QG_DEVICE void load_run(float (&v)[RUN], const SharedStorage& shared, u32 token, u32 row) {
#pragma unroll
    for (u32 i = 0; i < RUN; i += 4) {
        const f32x4 four = ld_shared(reinterpret_cast<const f32x4*>(shared.acc + accumulator_place(token, row + i)));
        v[i] = four.x, v[i + 1] = four.y, v[i + 2] = four.z, v[i + 3] = four.w;
    }
}

// Epilogue of the accumulators in shared memory.
// Lanes store runs of eight if rows of D are 16-byte aligned.
// Otherwise neighbouring lanes store neighbouring elements.
QG_DEVICE void store_tile(const SharedStorage& shared, const GemmParams& p, const WorkTile& work) {
    const u32 first_token = work.m_tile * QG_TILE_M, first_row = work.n_tile * TILE_N;
    if (!(p.shape.flags & QG_FLAG_D_ALIGNED16)) {
#pragma unroll 1
        for (u32 i = thread_index(); i < ELEMENTS; i += QG_THREADS) {
            const u32 token = i / TILE_N, row = i % TILE_N;
            store_by_lane(p, first_token + token, first_row + row,
                          ld_shared(&shared.acc[accumulator_place(token, row)]), true);
        }
        return;
    }
    const bool gated = p.shape.flags & QG_FLAG_GATED;
    const u32 rows = gated ? 2 * RUN : RUN;
#pragma unroll 1
    for (u32 i = thread_index() * rows; i < ELEMENTS; i += QG_THREADS * rows) {
        const u32 token = i / TILE_N, row = i % TILE_N;
        float acc[RUN];
        load_run(acc, shared, token, row);
        if (gated) {
            float up[RUN];
            load_run(up, shared, token, row + RUN);
            store_gated_run(p, first_token + token, first_row + row, acc, up);
        } else {
            store_run(p, first_token + token, first_row + row, acc);
        }
    }
}

// Stores the tile, or this CTA's part of a split tile.
// Afterwards shared memory is free.
QG_DEVICE void store(const Accumulators& acc, SharedStorage& shared, const GemmParams& p, const XSource& x_source, const WorkTile& work) {
    const u32 lane = thread_index() % 32, warp = thread_index() / 32;
    // Transpose the accumulators, [row][token], to rows of D.
    Engine::for_each(acc, lane, [&](u32 row, u32 token, float value) {
#if QG_X_PLANES
        value *= scale_of_row(x_source, token);
#endif
        st_shared(&shared.acc[accumulator_place(token, warp * WARP_ROWS + row)], value);
    });
    cta_barrier();
    const auto four = [&](u32 i) { return reinterpret_cast<f32x4*>(&shared.acc[accumulator_place(i / TILE_N, i % TILE_N)]); };
    if (work.peers == 1 || add_shared_partials<ELEMENTS>(p, work, &shared.last, four)) store_tile(shared, p, work);
    cta_barrier();
}

extern "C" __global__ void __launch_bounds__(QG_THREADS, QG_CTAS_PER_SM)
#if QG_X_PLANES
    qg_sm70_gemm_s8_two_stage(const __grid_constant__ XSource launched) {
    QG_TAKE_BYTES(x_source, launched);
    const GemmParams& p = x_source.gemm;
#else
    qg_sm70_gemm_two_stage(const __grid_constant__ KernelParams given) {
    QG_TAKE_PROBLEM(p, given);
    const XSource& x_source = p;
#endif
    SharedStorage& shared = *reinterpret_cast<SharedStorage*>(dynamic_shared());
    griddepcontrol_launch_dependents();
    griddepcontrol_wait();
    WorkList list = WorkList::of_cta(p);
    WorkTile work;
    while (WorkList::next(list, p, work)) {
        Accumulators acc = {};
        multiply(acc, shared, p, x_source, work);
#if QG_SEGMENT_TILES
        store(acc, shared, problem_of(p, work), x_source, work);
#else
        store(acc, shared, p, x_source, work);
#endif
    }
}
