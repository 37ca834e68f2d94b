// MMA attention for many queries. A CTA has
// QG_ROWS queries of a head; scores, softmax state
// and accumulators stay in registers of a warp.
// The next K tile and the current V tile are
// loaded meanwhile: with cp.async on Ampere, to
// shared memory on Turing, to registers on Volta.
#include "attention/sm70/prefill_not_finite.cuh"

// Occupancy bound where ptxas would
// otherwise aim for one more CTA per SM and
// spill (`kernels.lock` shows no spills).
#if QG_CTAS_PER_SM
#define QG_BOUNDS __launch_bounds__(QG_THREADS, QG_CTAS_PER_SM)
#else
#define QG_BOUNDS __launch_bounds__(QG_THREADS)
#endif

extern "C" __global__ void QG_BOUNDS
    qg_attention_mma(const __grid_constant__ KernelParams p) {
    SharedStorage& shared = *reinterpret_cast<SharedStorage*>(dynamic_shared());
    const u32 lane = thread_index() % 32, warp = thread_index() / 32;
    // The last queries of a causal sequence
    // attend to the most keys: they begin first.
    u32 cta = cta_index().x;
    const u32 head = cta % p.shape.heads;
    cta /= p.shape.heads;
    const u32 row_cta = p.at.row_ctas - 1 - cta % p.at.row_ctas;
    griddepcontrol_launch_dependents();
    griddepcontrol_wait();
    const Sequence s = sequence_of(p, cta / p.at.row_ctas);
    const u32 first_query = row_cta * QG_ROWS;
    if (first_query >= s.queries) return;
    const u32 last_query = least(first_query + QG_ROWS, s.queries) - 1;
    const u32 kv_head = head / (p.shape.heads / p.shape.kv_heads);
    const KeyRange keys = visible_keys_of(p, s, first_query, last_query);
    const KeyRange visible_to_all = {visible_keys(p, s, last_query).first, visible_keys(p, s, first_query).end};
    const u8* k_base = reinterpret_cast<const u8*>(p.at.k) + kv_head * p.at.k_head * 2;
    const u8* v_base = reinterpret_cast<const u8*>(p.at.v) + kv_head * p.at.v_head * 2;
#if QG_BITS
    const MaskedRows mask_rows = {s, head, first_query, last_query, keys.end};
#endif
    using KeyCopy = TileCopy<QG_QK, QK_PITCH>;
    using ValueCopy = TileCopy<QG_V, V_PITCH>;
    KeyCopy key_copy;
    ValueCopy value_copy;
    const auto copy_keys = [&](u32 tile) {
#if QG_BITS
        TileBits<QG_ROWS>::store_row_bits(shared.tiles, p, mask_rows, tile);
#endif
        find_present_keys(p, s, tile, keys, shared);
        KeyCopy::begin(key_copy, p, s, k_base, p.at.k_page, p.at.k_token, p.shape.qk_dim, tile, keys, shared.k);
    };

    copy_queries(p, s, shared, head, first_query, last_query);
    // Queries of this lane. Rows beyond
    // the last repeat the last query.
    const u32 own_row = first_row();
#if QG_VARIANT >= 75
    KeyRange visible[LANE_ROWS];
#pragma unroll
    for (u32 row = 0; row < LANE_ROWS; row++)
        visible[row] = visible_keys(p, s, least(first_query + own_row + Fragments::rows_below(row), last_query));
#else
    const VisibleKeys visible = {p, s, first_query, own_row, last_query};
#endif
    const auto is_key_visible = [&](u32 row, u32 key) -> bool {
#if QG_BITS
        // The mask bits in shared memory
        // already belong to the next tile.
        const u32 query = least(first_query + own_row + Fragments::rows_below(row), last_query);
        return mask_bits(p, mask_row(p, s, head, query), visible[row], key / WORD_KEYS * WORD_KEYS) >> key % WORD_KEYS & 1u;
#else
        return key >= visible[row].first && key < visible[row].end;
#endif
    };
    Rows rows = {};
#pragma unroll
    for (u32 row = 0; row < LANE_ROWS; row++) rows.row_max[row] = minus_infinity();
    const float factor = key_factor(p, kv_head);

    Operands operands;
    Operands::find(operands, shared.q, shared.k, shared.v, warp, lane);
    u32 tile = keys.first / QG_KEYS * QG_KEYS, next;
#if QG_BITS
    tile = TileBits<QG_ROWS>::next(shared.tiles, p, mask_rows, tile, true);
    if (tile < keys.end) copy_keys(tile);
#else
    if (keys.first < keys.end) copy_keys(tile);
#endif
    for (; tile < keys.end; tile = next) {
        KeyCopy::end(key_copy, shared.k);
        wait_for_copies();
        ValueCopy::begin(value_copy, p, s, v_base, p.at.v_page, p.at.v_token, p.shape.v_dim, tile, keys, shared.v);

        float scores[ROW_TILES * KEY_TILES][TILE_SUMS] = {};
        multiply_keys(scores, operands);
#if QG_BITS
        bool all_visible = TileBits<QG_ROWS>::is_full(shared.tiles, tile);
#else
        bool all_visible = tile >= visible_to_all.first && tile + QG_KEYS <= visible_to_all.end;
#endif
        u32 present[2] = {~0u, ~0u};
        if (p.shape.table_width != 0) {
#pragma unroll
            for (u32 i = 0; i < PRESENT_WORDS; i++) {
                present[i] = ld_shared(&shared.present[i]);
                all_visible = all_visible && (present[i] | NO_KEYS) == ~0u;
            }
        }
#if QG_BITS
        u32 bits[LANE_ROWS][QG_KEYS / WORD_KEYS];
#pragma unroll
        for (u32 i = 0; i < LANE_ROWS * QG_KEYS / WORD_KEYS; i++) {
            const u32 row = own_row + Fragments::rows_below(i % LANE_ROWS), word = i / LANE_ROWS;
            bits[i % LANE_ROWS][word] = ld_shared(&shared.tiles.of_row[row][word]) & present[word];
        }
#endif
        const auto is_hidden = [&](u32 n, u32 i) -> bool {
            const u32 row = Fragments::row_of<KEY_TILES>(n, i), column = Fragments::key_of(n, i, lane);
#if QG_BITS
            return !(bits[row][Fragments::first_key(n) / WORD_KEYS] >> column % WORD_KEYS & 1u);
#else
            if (all_visible) return false;
            const u32 key = tile + column;
            return !is_key_visible(row, key) || !(present[column / 32] >> column % 32 & 1u);
#endif
        };
        softmax_step(rows, scores, p, factor, is_hidden);

        ValueCopy::end(value_copy, shared.v);
        wait_for_copies();
#if QG_BITS
        next = TileBits<QG_ROWS>::next(shared.tiles, p, mask_rows, tile + QG_KEYS, false);
#else
        next = tile + QG_KEYS;
#endif
        if (next < keys.end) copy_keys(next);
        if (!all_visible) {
            zero_not_finite(shared);
            cta_barrier();
        }
        multiply_values(rows.sums, scores, operands, lane);
        if (!all_visible) add_not_finite(rows, p, s, shared, tile, v_base, is_key_visible);
    }
    store_rows(rows, p, s, head, first_query, last_query);
#if QG_VARIANT >= 80
    // Without keys, the copy of Q is still in flight.
    cp_async_wait_group<0>();
#endif
}
