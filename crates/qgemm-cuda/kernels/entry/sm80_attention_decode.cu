// Decode attention with MMA, for plain and quantized K
// and V. The query heads of a KV head are the rows of
// one tile, so that keys are read once. A CTA has 16
// rows, or 8 for quantized keys, and a part of the keys
// (split-KV). Each warp has its own K tiles, softmax
// and ring; warps are combined in order at the end.
//
// With QG_PAIRS, a CTA has eight rows of each of two
// KV heads, and two warps, one per head, share a ring.
#include "attention/sm80/decode_finish.cuh"
#include "attention/sm80/decode_pv.cuh"
#include "attention/sm80/decode_qk.cuh"
#include "attention/sm80/decode_walk.cuh"

extern "C" __global__ void __launch_bounds__(QG_THREADS, QG_CTAS_PER_SM)
#if QG_PAIRS
    qg_attention_decode(const __grid_constant__ TmaParams params) {
    const KernelParams& p = params.attention;
#else
    qg_attention_decode(const __grid_constant__ KernelParams p) {
#endif
    const u32 lane = thread_index() % 32, warp = thread_index() / 32;
    u8* const rings = reinterpret_cast<u8*>(dynamic_shared());
    u8* own_ring = rings + warp * RING_BYTES;
    // Scratch of the warp to transpose P.
#if QG_PAIRS
    u8* scratch = rings + WEIGHTS_AT + warp * WEIGHT_BYTES;
    TileRing::set_up(rings);
    cta_barrier();
#else
    u8* scratch = own_ring + SLOTS * SLOT_BYTES;
#endif
    // Overlap with the previous launch: compute everything
    // that does not depend on it before
    // griddepcontrol_wait. The store of `digest` keeps the
    // compiler from sinking the computation below the wait.
    const bool keys_ready = p.shape.flags & QG_FLAG_KEYS_READY;
    const WorkIndex index = WorkIndex::of(p, cta_index().x);
    Work work = keys_ready ? Work::of(p, index, sequence_of(p, index.sequence)) : Work::of_shape(p, index);
    const WorkIndex& place = work.place;
    const u32 kv_head = place.kv_head + own_head(), heads = place.heads, first_row = place.first_row;
    KeyRange keys = work.keys(p);
#if QG_PAIRS
    TileRing ring(params, work.s, keys, place.kv_head / KV_HEADS, rings);
#else
    TileRing ring(p, work.s, keys, kv_head, own_ring);
#endif
    u32* const saved = reinterpret_cast<u32*>(reinterpret_cast<u8*>(dynamic_shared()) + SAVED_AT);
    if (thread_index() == 0) st_shared(saved, work.digest(keys) ^ ring.digest());
    if (!keys_ready) {
        griddepcontrol_wait();
        if (Work::depends_on_operands(p)) {
            work = Work::of(p, place, sequence_of(p, place.sequence));
            keys = work.keys(p);
        }
        griddepcontrol_launch_dependents();
    }
    // Parts without visible keys write no result. If no key
    // is visible at all, part 0 writes the empty result.
    if (!work.has_rows() || (keys.first >= keys.end && !work.is_first_of_no_keys())) {
        // This kernel ends after the one ahead.
        if (keys_ready) griddepcontrol_wait();
        return;
    }
    const Sequence& s = work.s;
    const u32 last_row = work.last_row();
#if QG_BITS
    const u32 mask_row_number = least(first_row + lane % ROWS, last_row);
    ring.mask_range = visible_keys(p, s, mask_row_number / heads);
    ring.mask = mask_row(p, s, kv_head * heads + mask_row_number % heads, mask_row_number / heads);
#else
    KeyRange visible[2];
#pragma unroll
    for (u32 i = 0; i < 2; i++) visible[i] = visible_keys(p, s, least(first_row + lane_row(i), last_row) / heads);
    // Tiles that begin below `mixed_before`
    // or end above `mixed_from` need a mask.
    const KeyRange visible_to_all = {visible_keys(p, s, work.last_query()).first, visible_keys(p, s, place.first_query).end};
    const u32 mixed_before = keys.first < visible_to_all.first ? visible_to_all.first : 0, mixed_from = keys.end > visible_to_all.end ? visible_to_all.end : ~0u;
#endif
    TileWalk walk = TileWalk::of(ring, keys, own_ring);
    if (thread_index() == 0) SavedWork::of(p, work).save(saved);
    // Tiles of earlier tokens are copied before the wait,
    // if no mask chooses among their keys.
    const bool is_early = !QG_BITS && keys_ready && walk.filled_end(keys) <= beyond(s.keys, s.queries);
    const auto wait_for_launch_ahead = [] {
        griddepcontrol_wait();
        griddepcontrol_launch_dependents();
    };
    if (keys_ready && !is_early) wait_for_launch_ahead();
    // Loads issued after the copies wait for them. The
    // offset correction needs Q early, so it loads Q first.
    QueryOperands q;
    if constexpr (CodeRows::HAS_KEY_OFFSET)
        if (!is_early) q.load(p, work);
    walk.fill();
    if (is_early) wait_for_launch_ahead();
    if (is_early || !CodeRows::HAS_KEY_OFFSET) q.load(p, work);
    LaneRows rows = LaneRows::of(p, kv_head);
    walk.fill_rest();
#pragma unroll 1
    for (u32 tile = walk.first_tile; tile < keys.end; tile += KEY_GROUPS * TILE) {
        const u8* const k_rows = walk.wait();
        const u32 present = walk.present();
#if QG_BITS
        const u32 own_bits = ring.row_bits[0];
        u32 row_bits[2];
#pragma unroll
        for (u32 i = 0; i < 2; i++) row_bits[i] = shfl_idx_u32(own_bits, lane_row(i));
        const auto is_visible = [&](u32 i, u32 column) { return (bool)(row_bits[i] >> column & 1u); };
        const bool is_mixed = ballot((own_bits & present) != present) != 0;
        const bool any_visible = present != 0;
#else
        const auto is_visible = [&](u32 i, u32 column) { return tile + column >= visible[i].first && tile + column < visible[i].end; };
        const bool is_mixed = tile < mixed_before || tile + TILE > mixed_from;
        constexpr bool any_visible = true;
#endif
        float scores[SCORE_TILES][4] = {};
        if (any_visible) multiply_keys(scores, q, k_rows, k_rows + ring.template scales_at<false>());
        walk.free_keys(tile);
        if (any_visible) softmax_step(rows, scores, p, is_visible, is_mixed, present);
        const u8* const v_rows = walk.wait_for_values(tile);
        if (any_visible)
            add_values(rows, scores, is_visible, is_mixed, present, v_rows, v_rows + ring.template scales_at<true>(), scratch);
        walk.free_values(tile);
    }
    // row_max as a base-2 exponent.
#pragma unroll
    for (u32 i = 0; i < 2; i++) {
        float& row_max = rows.row_max[i];
        row_max = row_max == minus_infinity() ? row_max : row_max * rows.factor - WEIGHT_EXPONENT;
    }

    walk.end();
    store_result(*reinterpret_cast<WarpResult*>(own_ring), rows);
    cta_barrier();
    finish_cta(p, saved);
}
