// GEMV for few tokens. A CTA has few rows.
// Its warps split K and stream W without synchronization.
// The kernel is memory-bound: it reads every weight once,
// 16 bytes per lane.
#include "atoms/launch.cuh"
#if QG_USE_MMA
#include "mainloop/mma_k_block.cuh"
#else
#include "mainloop/simt_k_block.cuh"
#endif
#include "epilogue/sliced_k.cuh"
#include "sched/experts.cuh"
#if QG_PROJECTION
#include "mainloop/normalized_x.cuh"
#endif

constexpr u32 ROW_TILES = QG_ROW_TILES;
using Tile = XTile<QG_TILE_M, QG_X_K_TILES * QG_K_TILE>;
using Loop = Engine<ROW_TILES>;

struct SharedStorage {
    Tile x;
    WarpAccumulators acc[SLICES];
#if QG_PROJECTION
    RowStatistics rows;
#endif
    u32 last;
};
static_assert(sizeof(SharedStorage) == QG_SHARED_BYTES, "the host computes another size");

// Byte stride of a warp's k-tiles.
constexpr u32 STRIDE = SLICES * QG_K_TILE_BYTES;
// K-tiles in flight per warp, enough to cover memory latency.
struct Batch {
    KTile k_tile[QG_UNROLL][ROW_TILES];
};

// Address of this warp's next k-tile in each row tile.
struct Cursor {
    const u8* tile[ROW_TILES];

    QG_DEVICE void advance(Cursor& cursor, u32 bytes) {
#pragma unroll
        for (u32 rt = 0; rt < ROW_TILES; rt++) cursor.tile[rt] += bytes;
    }
};

QG_DEVICE void load_batch(Batch& batch, const Cursor& next, u32 lane) {
#pragma unroll
    for (u32 u = 0; u < QG_UNROLL; u++)
#pragma unroll
        for (u32 rt = 0; rt < ROW_TILES; rt++) KTile::load(batch.k_tile[u][rt], next.tile[rt] + u * STRIDE, lane);
}

QG_DEVICE void accumulate_k_tile(Loop::Accumulators& acc, const KTile (&k_tile)[ROW_TILES], const Tile& x, u32 x_k_tile,
                                 u32 lane) {
#pragma unroll
    for (u32 k_block = 0; k_block < K_BLOCKS; k_block++)
        Loop::accumulate(acc, k_tile, k_block, x, x_k_tile * K_BLOCKS + k_block, lane);
}

#if QG_PROJECTION
// Normalizes a column group of a token of the tile.
QG_DEVICE void normalize_group(XGroup& group, const RowStatistics& rows, const GemmParams& p, u32 token, u32 column) {
    if constexpr (QG_USE_MMA) {
#pragma unroll
        for (u32 i = 0; i < GROUP_WORDS; i++)
            group.word[i] = RowNormalizer::normalized_pair(rows, token, group.word[i], RowNormalizer::gamma(p, column + 2 * i),
                                                           RowNormalizer::gamma(p, column + 2 * i + 1));
    } else {
#pragma unroll
        for (u32 i = 0; i < GROUP_WORDS; i++) {
            const float v = RowNormalizer::normalized(rows, token, bits_to_f32(group.word[i]), RowNormalizer::gamma(p, column + i));
            // Operands have the type of X.
            group.word[i] = f32_to_bits(QG_X_DTYPE == DTYPE_F32 ? v : x_to_f32(f32_to_x(v)));
        }
    }
}
#endif

// Fills the tile with k-tiles [begin, begin +
// count), all tokens.
QG_DEVICE void fill_x_tile(SharedStorage& shared, const GemmParams& p, u32 first_token, u32 begin, u32 count, u32 thread) {
    for (u32 token = 0; token < QG_TILE_M; token++)
        for (u32 column = thread * GROUP; column < count * QG_K_TILE; column += QG_THREADS * GROUP) {
            XGroup group = load_x_group(p, first_token + token, begin * QG_K_TILE + column);
#if QG_PROJECTION
            if (normalizes_x(p) && first_token + token < p.shape.m)
                normalize_group(group, shared.rows, p, token, begin * QG_K_TILE + column);
#endif
            Tile::store(shared.x, token, column, group);
        }
}

extern "C" __global__ void __launch_bounds__(QG_THREADS, QG_CTAS_PER_SM)
    qg_gemv(const __grid_constant__ KernelParams given) {
    QG_TAKE_PROBLEM(p, given);
    SharedStorage& shared = *reinterpret_cast<SharedStorage*>(dynamic_shared());
    const u32 thread = thread_index(), lane = thread % 32, warp = thread / 32;
    const WorkTile work = WorkTile::of_grid(p);
    const u32 tiles = (p.shape.stored_rows + QG_TILE_ROWS - 1) / QG_TILE_ROWS;
    const u32 first_token = work.m_tile * QG_TILE_M;

    griddepcontrol_launch_dependents();
    Loop::Accumulators acc = {};
    Batch batch;
    for (u32 begin = work.begin; begin < work.end; begin += QG_X_K_TILES) {
        const u32 count = begin + QG_X_K_TILES < work.end ? QG_X_K_TILES : work.end - begin;
        Cursor next;
#pragma unroll
        for (u32 rt = 0; rt < ROW_TILES; rt++) {
            // Row tiles past the last are recomputed and not stored.
            const u32 tile = work.n_tile * ROW_TILES + rt < tiles ? work.n_tile * ROW_TILES + rt : tiles - 1;
            next.tile[rt] = reinterpret_cast<const u8*>(p.at.w) +
                            ((u64)tile * p.shape.k_tiles + begin + warp) * QG_K_TILE_BYTES;
        }
        u32 k_tile = warp;
        // Weights first: they come from memory.
        // All CTAs share X, which comes from L2.
        if (k_tile + (QG_UNROLL - 1) * SLICES < count) load_batch(batch, next, lane);
        if (begin == work.begin)
            griddepcontrol_wait();
        else
            cta_barrier();
#if QG_PROJECTION
        if (begin == work.begin && normalizes_x(p)) RowNormalizer::find(shared.rows, p, first_token, thread);
#endif
        fill_x_tile(shared, p, first_token, begin, count, thread);
        cta_barrier();
        while (k_tile + (QG_UNROLL - 1) * SLICES < count) {
            // The next batch is in flight during this one.
            Batch prefetched;
            const u32 following = k_tile + QG_UNROLL * SLICES;
            Cursor::advance(next, QG_UNROLL * STRIDE);
            if (following + (QG_UNROLL - 1) * SLICES < count) load_batch(prefetched, next, lane);
#pragma unroll
            for (u32 u = 0; u < QG_UNROLL; u++)
                accumulate_k_tile(acc, batch.k_tile[u], shared.x, k_tile + u * SLICES, lane);
            batch = prefetched;
            k_tile = following;
        }
#pragma unroll 1
        for (; k_tile < count; k_tile += SLICES) {
#pragma unroll
            for (u32 rt = 0; rt < ROW_TILES; rt++) KTile::load(batch.k_tile[0][rt], next.tile[rt], lane);
            Cursor::advance(next, STRIDE);
            accumulate_k_tile(acc, batch.k_tile[0], shared.x, k_tile, lane);
        }
    }

    Loop::reduce_lanes(acc);
    Loop::for_each(acc, lane, [&](u32 row, u32 token, float value) {
        WarpAccumulators::put(shared.acc[warp], row, token, value);
    });
    const bool products = are_products(p);
    cta_barrier();
    store_sliced_k(p, products, &shared.last, thread, [&](u32 i) -> const WarpAccumulators& { return shared.acc[i]; });
}
