// MMA attention for many queries. A CTA has
// QG_ROWS queries of a head; scores, softmax state
// and accumulators stay in registers of a warp.
// The next K tile and the current V tile are
// loaded meanwhile: with cp.async on Ampere, to
// shared memory on Turing, to registers on Volta.
#include "attention/finish.cuh"
#include "attention/qk.cuh"
#include "attention/sm70/prefill_not_finite.cuh"
#include "attention/sm70/prefill_rows.cuh"
#include "attention/value_slice.cuh"

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
    const u32 features = features_of_cta(p);
    const u8* v_base = reinterpret_cast<const u8*>(p.at.v) + (kv_head * p.at.v_head + first_feature()) * 2;
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
    const u32 own_row = warp * WARP_ROWS + Fragments::first_row(lane);
#if QG_VARIANT >= 75
    KeyRange visible[LANE_ROWS];
#pragma unroll
    for (u32 row = 0; row < LANE_ROWS; row++)
        visible[row] = visible_keys(p, s, least(first_query + own_row + Fragments::rows_below(row), last_query));
#else
    const VisibleKeys visible = {p, s, first_query, own_row, last_query};
#endif
    float sums[ROW_TILES * FEATURE_TILES][TILE_SUMS] = {};
    float row_max[LANE_ROWS], row_sum[LANE_ROWS] = {};
#pragma unroll
    for (u32 row = 0; row < LANE_ROWS; row++) row_max[row] = minus_infinity();
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
        ValueCopy::begin(value_copy, p, s, v_base, p.at.v_page, p.at.v_token, features, tile, keys, shared.v);

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
        float next_max[LANE_ROWS] = {row_max[0], row_max[1]};
#pragma unroll
        for (u32 row = 2; row < LANE_ROWS; row++) next_max[row] = row_max[row];
#pragma unroll
        for (u32 n = 0; n < ROW_TILES * KEY_TILES; n++) {
#pragma unroll
            for (u32 i = 0; i < TILE_SUMS; i++) {
                float& score = scores[n][i];
                const u32 row = Fragments::row_of<KEY_TILES>(n, i);
                score = bounded(p, score * factor);
#if QG_BITS
                const u32 column = Fragments::key_of(n, i, lane);
                if (!(bits[row][Fragments::first_key(n) / WORD_KEYS] >> column % WORD_KEYS & 1u)) score = minus_infinity();
#else
                if (!all_visible) {
                    const u32 column = Fragments::key_of(n, i, lane), key = tile + column;
                    const bool is_visible = key >= visible[row].first && key < visible[row].end;
                    if (!is_visible || !(present[column / 32] >> column % 32 & 1u)) score = minus_infinity();
                }
#endif
                next_max[row] = score > next_max[row] ? score : next_max[row];
            }
        }
        float rescale[LANE_ROWS], base[LANE_ROWS];
#pragma unroll
        for (u32 row = 0; row < LANE_ROWS; row++) {
#pragma unroll
            for (u32 i = 0; i < 2; i++) {
                const float other = shfl_xor(next_max[row], Fragments::SAME_ROWS[i]);
                next_max[row] = other > next_max[row] ? other : next_max[row];
            }
            // Avoid (−inf) − (−inf) = NaN when a row is fully masked.
            base[row] = next_max[row] == minus_infinity() ? 0.0f : next_max[row];
            rescale[row] = ex2_approx(row_max[row] - base[row]);
            row_max[row] = next_max[row];
            row_sum[row] *= rescale[row];
        }
#pragma unroll
        for (u32 n = 0; n < ROW_TILES * KEY_TILES; n++) {
#pragma unroll
            for (u32 i = 0; i < TILE_SUMS; i++) {
                const u32 row = Fragments::row_of<KEY_TILES>(n, i);
                scores[n][i] = ex2_approx(scores[n][i] - base[row]);
                row_sum[row] += scores[n][i];
            }
        }
#pragma unroll
        for (u32 n = 0; n < ROW_TILES * FEATURE_TILES; n++) {
#pragma unroll
            for (u32 i = 0; i < TILE_SUMS; i++) sums[n][i] *= rescale[Fragments::row_of<FEATURE_TILES>(n, i)];
        }

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
        multiply_values(sums, scores, operands, lane);
        // Adds the replaced infinities and NaN
        // to the queries that attend to them.
        for (u32 j = 0; !all_visible && j < QG_KEYS; j++) {
            const u32 key = tile + j;
            if (ld_shared(&shared.not_finite[j]) == 0) continue;
            const KeyAddress at = address_of_key(p, s, key);
            const u8* from = v_base + (at.page * p.at.v_page + at.row * p.at.v_token) * 2;
#if QG_BITS
            // The mask bits in shared memory
            // already belong to the next tile.
            u32 row_visible[LANE_ROWS];
#pragma unroll
            for (u32 i = 0; i < LANE_ROWS; i++) {
                const u32 query = least(first_query + own_row + Fragments::rows_below(i), last_query);
                const u8* row = mask_row(p, s, head, query);
                row_visible[i] = mask_bits(p, row, visible[i], key / WORD_KEYS * WORD_KEYS) >> key % WORD_KEYS & 1u;
            }
#endif
#pragma unroll
            for (u32 n = 0; n < ROW_TILES * FEATURE_TILES; n++) {
#pragma unroll
                for (u32 i = 0; i < TILE_SUMS; i++) {
                    const u32 column = Fragments::feature_of(n, i, lane), row = Fragments::row_of<FEATURE_TILES>(n, i);
#if QG_BITS
                    const bool is_visible = row_visible[row];
#else
                    const bool is_visible = key >= visible[row].first && key < visible[row].end;
#endif
                    if (!is_visible || column >= features) continue;
                    const u32 half = ld_global_u16(from + column * 2);
                    if (!is_finite(half)) sums[n][i] += QG_KV == DTYPE_BF16 ? bf16_to_f32(half) : f16_to_f32(half);
                }
            }
        }
    }

    u8* d = reinterpret_cast<u8*>(p.at.d);
#pragma unroll
    for (u32 own = 0; own < LANE_ROWS; own++) {
#pragma unroll
        for (u32 i = 0; i < 2; i++) row_sum[own] += shfl_xor(row_sum[own], Fragments::SAME_ROWS[i]);
        const u32 query = first_query + own_row + Fragments::rows_below(own);
        if (query > last_query) continue;
        const RowEnd end = end_of_row(p, head, row_max[own], row_sum[own], 1.0f);
        const u64 token = s.token + query;
        const u64 gate = gate_of(p, token, head) + first_feature();
        u8* row = d + (token * p.at.d_token + head * p.at.d_head + first_feature()) * 2;
#pragma unroll
        for (u32 tile = 0; tile < FEATURE_TILES; tile++) {
#pragma unroll
            for (u32 first = 0; first < TILE_SUMS; first += 4) {
                const u32 n = own / 2 * FEATURE_TILES + tile, i = own % 2 * 2 + first;
                const u32 column = Fragments::feature_of(n, i, lane);
                if (column >= features) continue;
                float low = sums[n][i] * end.scale, high = sums[n][i + 1] * end.scale;
                if (p.at.gate) multiply_by_gate(p, gate + column, low, high);
                const u32 pair = rounded_pair(low, high);
                if (p.shape.flags & QG_FLAG_D_ALIGNED) {
                    st_global_u32(row + column * 2, pair);
                } else {
                    st_global_u16(row + column * 2, pair);
                    st_global_u16(row + column * 2 + 2, pair >> 16);
                }
            }
        }
        const bool is_first = (lane & (Fragments::SAME_ROWS[0] | Fragments::SAME_ROWS[1])) == 0;
        if (is_first && first_feature() == 0) store_lse(p, token, head, end);
    }
#if QG_VARIANT >= 80
    // Without keys, the copy of Q is still in flight.
    cp_async_wait_group<0>();
#endif
}
