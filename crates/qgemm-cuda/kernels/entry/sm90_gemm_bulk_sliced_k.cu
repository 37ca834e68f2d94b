// Sliced-K GEMM for few tokens on Hopper, memory-bound.
// CTAs of a persistent grid take row tiles in turn.
// Each warp has a slice of K.
// It copies its W in long bulk pieces and loads its
// columns of X once.
// Warps meet only to add the sums of a row tile.
// The rest of shared memory holds W in flight.
#include "atoms/launch.cuh"
#include "epilogue/row_tile_slices_store.cuh"
#include "mainloop/w_slice_ring.cuh"
#include "mainloop/x_slice_copies.cuh"
#include "mainloop/x_sum_table.cuh"

static_assert(QG_ROW_TILES == 1 && QG_WARPS_N == 1 && QG_CLUSTER == 1, "a CTA has a row tile at a time");

struct WarpMemory : ScaleTableOfWarp {
    u64 full[PIECES];
};
// Followed by X, its block sums, and all warps' rings.
struct SharedStorage {
    // Two row tiles alternate: a warp may be one ahead.
    RowTileSums sums[2];
    WarpMemory warp[WARPS];
};
constexpr u32 FIXED_BYTES = (sizeof(SharedStorage) + 127) / 128 * 128;
static_assert(FIXED_BYTES == QG_FIXED_BYTES, "the host computes another size");

extern "C" __global__ void __launch_bounds__(QG_THREADS, QG_CTAS_PER_SM)
    qg_sm90_gemm_bulk_sliced_k(const __grid_constant__ KernelParams given) {
    QG_TAKE_PROBLEM(p, given);
    SharedStorage& shared = *reinterpret_cast<SharedStorage*>(dynamic_shared());
    const u32 thread = thread_index(), lane = thread % 32, warp = shfl_idx_u32(thread / 32, 0);
    const u32 k_tiles = p.shape.k_tiles, n_tiles = p.tiles.n_tiles;
    const KSlice slice = KSlice::of_warp(k_tiles, warp);
    XStage* const all_x = reinterpret_cast<XStage*>(dynamic_shared() + FIXED_BYTES);
    XSumTable* const all_sums = reinterpret_cast<XSumTable*>(all_x + k_tiles * K_BLOCKS);
    const u32 before_rings = FIXED_BYTES + k_tiles * (K_BLOCKS * sizeof(XStage) + (HAS_X_SUM_TABLE ? sizeof(XSumTable) : 0));
    u8* const rings = dynamic_shared() + (before_rings + LINE_BYTES - 1) / LINE_BYTES * LINE_BYTES;
    WSliceRing ring = WSliceRing::of_warp(rings, dynamic_shared() + QG_SHARED_BYTES, shared.warp[warp].full, p, slice, warp);
    if (lane == 0) WSliceRing::init(ring);
    warp_barrier();
    // Weights first: they come from memory.
    // All CTAs share X, which comes from L2.
    // X queues behind earlier copies, so the second piece follows X.
    const u64 policy = l2_evict_first();
    WSliceRing::ask(ring, n_tiles, policy, lane);
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();

    XStage* const x = all_x + slice.first * K_BLOCKS;
    XSumTable* const x_sums = all_sums + slice.first;
    const XCursor cursor = XCursor::of_lane_in_k_steps(lane);
    copy_x_slice(x, p, slice.first * K_BLOCKS, slice.k_tiles * K_BLOCKS, lane);
    cp_async_commit_group();
    WSliceRing::ask(ring, n_tiles, policy, lane);
    const bool plain = is_plain_row_tile(p);
    cp_async_wait_group<0>();
    warp_barrier();
    if constexpr (HAS_X_SUM_TABLE) {
        XSumTable::make(x_sums, x, slice.k_tiles, cursor, 0, 1, lane);
        warp_barrier();
    }

    u32 turn = 0;
#pragma unroll 1
    for (u32 n_tile = cta_index().x; n_tile < n_tiles; n_tile += grid_ctas().x, turn ^= 1) {
        Accumulators acc = {};
        const XStage* columns = x;
        const XSumTable* sums = x_sums;
#pragma unroll 1
        for (u32 left = slice.k_tiles; left > 0;) {
            const u32 count = left < ring.piece_k_tiles ? left : ring.piece_k_tiles;
            const u8* w = WSliceRing::take(ring, n_tile, slice.k_tiles - left);
#pragma unroll 2
            for (u32 i = 0; i < count; i++, w += QG_K_TILE_BYTES, columns += K_BLOCKS, sums++)
                multiply_k_tile(acc, *reinterpret_cast<const u8(*)[1][QG_K_TILE_BYTES]>(w), columns, cursor, shared.warp[warp], lane,
                                [&](const XSpan&, u32 tt, u32, u32 sub) {
                                    return HAS_X_SUM_TABLE ? XSumTable::of(*sums, tt, sub, lane) : XBlockSum{};
                                });
            left -= count;
            warp_barrier();
            WSliceRing::ask(ring, n_tiles, policy, lane);
        }
        RowTileSums& tile_sums = shared.sums[turn];
        for_each_accumulator(acc, lane, [&](u32 row, u32 token, float value) {
            // The other tokens are copies of token 0.
            if (QG_X_ROWS > 1 || token == 0) WarpAccumulators::put(tile_sums.of_slice[warp], row, token, value);
        });
        cta_barrier();
        store_row_tile_slices(p, plain, tile_sums, n_tile, thread);
    }
}
