// Warp-specialized attention for many queries on
// Hopper. A producer warp copies Q, K and V with TMA,
// three inspector warps check V of masked tiles, and
// each consumer warpgroup has 64 queries of a head.
// CTAs are persistent: while consumers store results,
// the producer fills the ring for the next item.
#include "attention/store.cuh"
#include "mainloop/register_shares.cuh"
#include "attention/sm90/wgmma.cuh"
#if QG_PAGES
#include "attention/sm90/pages.cuh"
#endif

using Registers = RegisterShares<(WARPGROUPS == 2 ? 40 : 32)>;

// Stores the lane's row ROW (0 or 1).
template <u32 ROW>
QG_DEVICE void store(const Rows& rows, const AttentionParams& p, const AttentionItem& item, const Consumer& own, u32 warp) {
    const u32 query = item.first_query + warp * 16 + own.lane / 4 + 8 * ROW;
    store_query<ROW>(rows.sums, p, item.s, item.head, query, query <= item.last_query,
                     max_exponent(rows.row_max[ROW], own.factor), rows.row_sum[ROW]);
}

QG_DEVICE void consume(AttentionRing& ring, const TmaAttentionParams& params, u32 thread) {
    const AttentionParams& p = params.attention;
    const u32 warp = shfl_idx_u32(thread / 32, 0);
    Consumer own = {warp / 4, thread % 32, {}, {}, QG_BOUNDED ? 1.0f : p.shape.factor};
    u32 q_parity = 0;
    ItemWalk walk = {};
    AttentionItem item;
    if (own.warpgroup + 1 == WARPGROUPS) pass_turn(own);
    while (ItemWalk::next(walk, params, item)) {
        Rows rows = {};
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
            rows.row_max[i] = minus_infinity();
            const u32 query = item.first_query + warp * 16 + own.lane / 4 + 8 * i;
            rows.visible[i] = visible_keys(p, item.s, least(query, item.last_query));
#if QG_BITS
            rows.mask[i] = mask_row(params.attention, item.s, item.head, least(query, item.last_query));
#endif
        }
        if (item.tiles > 0) {
            mbarrier_wait(&ring.q_full, q_parity);
            q_parity ^= 1;
            attend(rows, ring, own, params, item);
        }
        store<0>(rows, p, item, own, warp);
        store<1>(rows, p, item, own, warp);
    }
    // Consume the turn that was passed last,
    // so that the barrier is balanced.
    if (own.warpgroup == 0) take_turn(own);
}

extern "C" __global__ void __launch_bounds__(QG_THREADS, 1)
    qg_sm90_attention_wgmma_ws(const __grid_constant__ TmaAttentionParams params) {
    AttentionRing& ring = *reinterpret_cast<AttentionRing*>(dynamic_shared());
    const u32 thread = thread_index();
    if (thread == 0) AttentionRing::init(ring);
    cta_barrier();
    griddepcontrol_launch_dependents();
    griddepcontrol_wait();
    // The shuffle makes the role warp-uniform for the compiler.
    if (shfl_idx_u32(thread / CONSUMERS, 0) == 0) {
        Registers::take();
        consume(ring, params, thread);
    } else {
        Registers::give();
        const u32 warp = shfl_idx_u32((thread - CONSUMERS) / 32, 0), lane = thread % 32;
#if QG_PAGES
        produce_pages(ring, params, warp, lane);
#else
        if (warp > 0)
            inspect(ring, params, warp - 1, lane);
        else if (lane == 0)
            produce(ring, params);
#endif
    }
}
