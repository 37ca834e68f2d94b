// D[m, n] for a few tokens: one tile of rows a block, its K dimension shared by the block's warps, which stream
// through the weight without waiting for each other. Bound by memory: every weight is read once, 16 bytes a lane.
#include "atoms/types.cuh"
#if QG_USE_MMA
#include "mainloop/mma_chunk.cuh"
#else
#include "mainloop/fma_chunk.cuh"
#endif
#include "epilogue/store.cuh"
#include "sched/split.cuh"

constexpr u32 WARPS = QG_THREADS / 32;
constexpr u32 ELEMENTS = QG_TILE_ROWS * QG_TILE_M;
using Tile = XTile<QG_TILE_M, QG_X_SLABS * QG_SLAB_K>;
using Loop = Engine<1>;

struct SharedStorage {
    Tile x;
    float partial[WARPS][ELEMENTS];
    u32 last;
};
static_assert(sizeof(SharedStorage) == QG_SHARED_BYTES, "the host computes another size");

// Slabs that a warp has in flight before it computes: enough bytes to cover the memory's latency.
struct Batch {
    Slab slab[QG_UNROLL][1];
};

QG_DEVICE void load_batch(Batch& batch, const u8* tile, u32 first, u32 end, u32 lane) {
#pragma unroll
    for (u32 u = 0; u < QG_UNROLL; u++) {
        const u32 index = first + u * WARPS;
        if (index < end) Slab::load(batch.slab[u][0], tile + (u64)index * QG_SLAB_BYTES, lane);
    }
}

extern "C" __global__ void __launch_bounds__(QG_THREADS, QG_BLOCKS_PER_SM)
    qg_gemv(const __grid_constant__ GemmParams p) {
    extern __shared__ __align__(16) u8 shared_bytes[];
    SharedStorage& shared = *reinterpret_cast<SharedStorage*>(shared_bytes);
    const u32 thread = thread_index(), lane = thread % 32, warp = thread / 32;
    const TileWork work = TileWork::of_block(p);
    const u8* tile = reinterpret_cast<const u8*>(p.at.w) + (u64)work.n_tile * p.shape.k_slabs * QG_SLAB_BYTES;
    const u32 first_token = work.m_tile * QG_TILE_M;

    Loop::Sums sums = {};
    Batch batch;
    for (u32 begin = work.begin; begin < work.end; begin += QG_X_SLABS) {
        const u32 end = begin + QG_X_SLABS < work.end ? begin + QG_X_SLABS : work.end;
        // Weights first: they come from memory while X, which all blocks share, comes from L2.
        load_batch(batch, tile, begin + warp, end, lane);
        if (begin != work.begin) block_barrier();
        for (u32 group = thread; group < Tile::GROUPS; group += QG_THREADS) {
            const u32 columns = QG_X_SLABS * QG_SLAB_K / GROUP;
            const u32 column = group % columns * GROUP;
            if (column < (end - begin) * QG_SLAB_K)
                Tile::store(shared.x, group,
                            load_x_group(p, first_token + group / columns, begin * QG_SLAB_K + column));
        }
        block_barrier();
        for (u32 index = begin + warp; index < end; index += WARPS * QG_UNROLL) {
            if (index != begin + warp) load_batch(batch, tile, index, end, lane);
#pragma unroll
            for (u32 u = 0; u < QG_UNROLL; u++) {
                if (index + u * WARPS < end) {
                    const u32 x_chunk = (index + u * WARPS - begin) * CHUNKS;
#pragma unroll
                    for (u32 chunk = 0; chunk < CHUNKS; chunk++)
                        Loop::accumulate(sums, batch.slab[u], chunk, shared.x, x_chunk + chunk, lane);
                }
            }
        }
    }

    // Sum over the warps, in their order.
    Loop::reduce_lanes(sums);
    Loop::for_each(sums, lane, [&](u32 row, u32 token, float value) {
        st_shared(&shared.partial[warp][token * QG_TILE_ROWS + row], value);
    });
    block_barrier();
    float sum[(ELEMENTS + QG_THREADS - 1) / QG_THREADS];
#pragma unroll
    for (u32 i = 0; i < sizeof(sum) / 4; i++) {
        const u32 element = thread + i * QG_THREADS;
        sum[i] = 0;
        if (element < ELEMENTS)
            for (u32 w = 0; w < WARPS; w++) sum[i] += ld_shared(&shared.partial[w][element]);
    }

    if (p.shape.splits > 1) {
        float* mine = partial_sums(p, work, work.split, ELEMENTS);
#pragma unroll
        for (u32 i = 0; i < sizeof(sum) / 4; i++)
            if (thread + i * QG_THREADS < ELEMENTS) st_global_f32(mine + thread + i * QG_THREADS, sum[i]);
        if (!arrive_and_check_last(p, work, &shared.last)) return;
#pragma unroll
        for (u32 i = 0; i < sizeof(sum) / 4; i++) {
            sum[i] = 0;
            if (thread + i * QG_THREADS < ELEMENTS)
                for (u32 s = 0; s < p.shape.splits; s++)
                    sum[i] += ld_global_cg_f32(partial_sums(p, work, s, ELEMENTS) + thread + i * QG_THREADS);
        }
    }
#pragma unroll
    for (u32 i = 0; i < sizeof(sum) / 4; i++) {
        const u32 element = thread + i * QG_THREADS;
        if (element < ELEMENTS)
            store_output(p, first_token + element / QG_TILE_ROWS, work.n_tile * QG_TILE_ROWS + element % QG_TILE_ROWS,
                         sum[i]);
    }
}
