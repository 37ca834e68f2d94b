// SIMT GEMM on CUDA cores, any M.
// Each warp owns rows of W and loads them directly to registers.
// X is double-buffered in shared memory:
// the next k-block is loaded while one is multiplied.
#include "atoms/launch.cuh"
#include "atoms/sync.cuh"
#include "epilogue/store.cuh"
#include "mainloop/simt_k_block.cuh"
#include "sched/experts.cuh"
#include "sched/split.cuh"

constexpr u32 WARPS = QG_THREADS / 32;
constexpr u32 ROW_TILES = QG_ROW_TILES;
constexpr u32 WARP_ROWS = ROW_TILES * QG_TILE_ROWS;
constexpr u32 TILE_N = WARPS * WARP_ROWS;
constexpr u32 ELEMENTS = TILE_N * QG_TILE_M;
static_assert(ELEMENTS % QG_THREADS == 0, "whole warps store");
// Four words of padding:
// the tokens of a warp's lanes use different banks.
constexpr u32 ACC_PITCH = TILE_N + 4;
using Tile = XTile<QG_TILE_M, K_BLOCK>;
using Loop = Engine<ROW_TILES>;

struct SharedStorage {
    union {
        Tile x[2];
        float acc[QG_TILE_M * ACC_PITCH];  // [token][row of W]
    };
    u32 last;
};
static_assert(sizeof(SharedStorage) == QG_SHARED_BYTES, "the host computes another size");

// Groups of an X tile that one thread moves.
constexpr u32 ROW_GROUPS = Tile::ROW_GROUPS;
constexpr u32 GROUPS = QG_TILE_M * ROW_GROUPS;
constexpr u32 THREAD_GROUPS = (GROUPS + QG_THREADS - 1) / QG_THREADS;

QG_DEVICE void load_x(XGroup (&groups)[THREAD_GROUPS], const GemmParams& p, u32 first_token, u32 k_block, u32 thread) {
#pragma unroll
    for (u32 i = 0; i < THREAD_GROUPS; i++) {
        const u32 group = thread + i * QG_THREADS;
        if (group < GROUPS)
            groups[i] =
                load_x_group(p, first_token + group / ROW_GROUPS, k_block * K_BLOCK + group % ROW_GROUPS * GROUP);
    }
}

QG_DEVICE void store_x(Tile& tile, const XGroup (&groups)[THREAD_GROUPS], u32 thread) {
#pragma unroll
    for (u32 i = 0; i < THREAD_GROUPS; i++) {
        const u32 group = thread + i * QG_THREADS;
        if (group < GROUPS) Tile::store(tile, group / ROW_GROUPS, group % ROW_GROUPS * GROUP, groups[i]);
    }
}

extern "C" __global__ void __launch_bounds__(QG_THREADS, QG_CTAS_PER_SM)
    qg_gemm_simt(const __grid_constant__ KernelParams given) {
    QG_TAKE_PROBLEM(p, given);
    SharedStorage& shared = *reinterpret_cast<SharedStorage*>(dynamic_shared());
    const u32 thread = thread_index(), lane = thread % 32, warp = thread / 32;
    const WorkTile work = WorkTile::of_grid(p);
    const u32 first_token = work.m_tile * QG_TILE_M;
    const u32 first_tile = (work.n_tile * WARPS + warp) * ROW_TILES;
    const u32 tiles = (p.shape.stored_rows + QG_TILE_ROWS - 1) / QG_TILE_ROWS;

    griddepcontrol_launch_dependents();
    griddepcontrol_wait();
    Loop::Accumulators acc = {};
    XGroup groups[THREAD_GROUPS];
    load_x(groups, p, first_token, work.begin * K_BLOCKS, thread);
    store_x(shared.x[0], groups, thread);
    cta_barrier();
    u32 stage = 0;
    for (u32 k_tile = work.begin; k_tile < work.end; k_tile++) {
        KTile k_tiles[ROW_TILES];
#pragma unroll
        for (u32 rt = 0; rt < ROW_TILES; rt++) {
            // Warps past the last row tile recompute it and store nothing.
            const u32 tile = first_tile + rt < tiles ? first_tile + rt : tiles - 1;
            KTile::load(k_tiles[rt],
                       reinterpret_cast<const u8*>(p.at.w) + ((u64)tile * p.shape.k_tiles + k_tile) * QG_K_TILE_BYTES,
                       lane);
        }
#pragma unroll
        for (u32 k_block = 0; k_block < K_BLOCKS; k_block++) {
            const bool more = k_block + 1 < K_BLOCKS || k_tile + 1 < work.end;
            if (more) load_x(groups, p, first_token, k_tile * K_BLOCKS + k_block + 1, thread);
            Loop::accumulate(acc, k_tiles, k_block, shared.x[stage], 0, lane);
            if (more) store_x(shared.x[stage ^ 1], groups, thread);
            cta_barrier();
            stage ^= 1;
        }
    }

    // Transpose the accumulators, [row][token], to rows of D.
    Loop::reduce_lanes(acc);
    Loop::for_each(acc, lane, [&](u32 row, u32 token, float value) {
        st_shared(&shared.acc[token * ACC_PITCH + warp * WARP_ROWS + row], value);
    });
    cta_barrier();
    const auto four = [&](u32 i) { return reinterpret_cast<f32x4*>(&shared.acc[i / TILE_N * ACC_PITCH + i % TILE_N]); };
    if (p.shape.splits > 1 && !add_shared_partials<ELEMENTS>(p, work, &shared.last, four)) return;
#pragma unroll 1
    for (u32 i = thread; i < ELEMENTS; i += QG_THREADS) {
        const u32 token = i / TILE_N, row = i % TILE_N;
        store_by_lane(p, first_token + token, work.n_tile * TILE_N + row, ld_shared(&shared.acc[token * ACC_PITCH + row]), true);
    }
}
