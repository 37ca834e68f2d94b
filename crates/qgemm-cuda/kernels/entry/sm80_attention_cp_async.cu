// MMA attention for many queries, from
// Ampere on. A CTA has 128 queries of a head. A warp
// has 32 queries, so that each K and V fragment
// serves two row tiles. cp.async loads the next
// K tile and the current V tile meanwhile. Rows
// have no padding: 16-byte chunks are XOR-swizzled
// by the row to avoid bank conflicts.
#include "atoms/opaque_register.cuh"
#include "attention/qk.cuh"
#include "attention/sm80/prefill_not_finite.cuh"
#include "attention/sm80/prefill_products.cuh"
#include "attention/store.cuh"

// One K tile; MIXED applies the mask. Starts the copy
// of the next tile's keys and returns that tile.
template <bool MIXED>
QG_DEVICE u32 step(Rows& rows, const KernelParams& p, SharedStorage& shared, u32 tile) {
    {
        const Work work = Work::load(shared.work);
        copy_tile<QG_V>(p, work, work.v, p.at.v_page, p.at.v_token, p.shape.v_dim, tile, shared.v);
        cp_async_commit_group();
    }
    float scores[ROW_TILES][SCORES] = {};
    multiply_keys(scores, shared);
    u32 weights[ROW_TILES][QG_KEYS / MMA_K][4];
#pragma unroll
    for (u32 row = 0; row < ROW_TILES; row++) {
        if constexpr (QG_BOUNDED) {
#pragma unroll
            for (u32 i = 0; i < SCORES; i++) scores[row][i] = bounded(p, scores[row][i] * p.shape.factor);
        }
        if constexpr (MIXED) {
#if QG_BITS
            mask_scores_by_bits(scores[row], shared, row);
#else
            KeyRange visible[2];
            visible_to_lane(visible, p, Work::load(shared.work), row);
            mask_scores(scores[row], visible, tile);
#endif
            if (p.shape.table_width != 0) mask_pages(scores[row], shared);
        }
        float rescale[2];
        online_softmax(scores[row], rescale, rows.row_max[row], rows.row_sum[row], factor(p));
#pragma unroll
        for (u32 i = 0; i < SCORES / 2; i++)
            weights[row][i / 4][i % 4] = opaque_register(rounded_pair(scores[row][2 * i], scores[row][2 * i + 1]));
        if (!needs_rescale(rescale)) continue;
#pragma unroll
        for (u32 i = 0; i < SUMS; i++) rows.sums[row][i] *= rescale[i / 2 % 2];
    }

    wait_for_copies();
    const u32 next = tile_behind(p, Work::load(shared.work), shared, tile);
    if (next < ld_shared(&shared.work.keys.end)) copy_keys(p, Work::load(shared.work), shared, next);
    if constexpr (MIXED) {
        zero_not_finite(shared);
        cta_barrier();
    }
    multiply_values(rows, weights, shared);
    return next;
}

// Stores the lane's row ROW (0 or 1) of every row tile.
template <u32 ROW>
QG_DEVICE void store(const Rows& rows, const AttentionParams& p, const Work& work) {
#pragma unroll
    for (u32 i = 0; i < ROW_TILES; i++) {
        const u32 row = thread_index() / 32 * WARP_ROWS + i * 16 + thread_index() % 32 / 4 + 8 * ROW;
        const u32 query = work.first_query + row;
        store_query<ROW>(rows.sums[i], p, work.s, work.head, query, query <= work.last_query,
                         max_exponent(rows.row_max[i][ROW], factor(p)), rows.row_sum[i][ROW]);
    }
}

extern "C" __global__ void __launch_bounds__(QG_THREADS, QG_CTAS_PER_SM)
    qg_sm80_attention_cp_async(const __grid_constant__ CpAsyncParams params) {
    const KernelParams& p = params.attention;
    SharedStorage& shared = *reinterpret_cast<SharedStorage*>(dynamic_shared());
    griddepcontrol_launch_dependents();
    griddepcontrol_wait();
    u32 tile;
    {
        Work work;
        if (!work_of(params, cta_index().x, work)) return;
        if (thread_index() == 0) {
            Work::store(shared.work, work);
            st_shared(&shared.not_finite, 0u);
        }
        copy_queries(p, work, shared);
        tile = work.keys.first / QG_KEYS * QG_KEYS;
#if QG_BITS
        tile = TileBits<ROWS>::next(shared.tiles, p, masked_rows(work), tile, true);
        if (tile < work.keys.end) copy_keys(p, work, shared, tile);
#else
        if (work.keys.first < work.keys.end) copy_keys(p, work, shared, tile);
#endif
    }
    Rows rows = {};
#pragma unroll
    for (u32 i = 0; i < ROW_TILES * 2; i++) rows.row_max[i / 2][i % 2] = minus_infinity();
    for (;;) {
        wait_for_copies();
        const Work work = Work::load(shared.work);
        if (tile >= work.keys.end) break;
        if (is_mixed(p, work, shared, tile))
            tile = step<true>(rows, p, shared, tile);
        else
            tile = step<false>(rows, p, shared, tile);
    }
    const Work work = Work::load(shared.work);
    if (ld_shared(&shared.not_finite) != 0) add_not_finite(rows, p, work, shared);
    store<0>(rows, p, work);
    store<1>(rows, p, work);
}
