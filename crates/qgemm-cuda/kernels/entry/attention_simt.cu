// FMA attention for any number of queries, with
// split-KV. A CTA has QG_ROWS rows (queries × heads of
// a KV head) and a part of the keys. A group of
// QG_LANES lanes holds a key, QG_LANE_FEATURES a lane.
// Each group has its own online softmax over every
// GROUPS-th key; the CTA combines the groups in order.
#include "attention/simt/mask.cuh"
#include "attention/simt/step.cuh"

// Occupancy bound where ptxas would
// otherwise aim for one more CTA per SM and
// spill (`kernels.lock` shows no spills).
#if QG_CTAS_PER_SM
#define QG_BOUNDS __launch_bounds__(QG_THREADS, QG_CTAS_PER_SM)
#else
#define QG_BOUNDS __launch_bounds__(QG_THREADS)
#endif

extern "C" __global__ void QG_BOUNDS
    qg_attention_simt(const __grid_constant__ KernelParams p) {
    SharedStorage& shared = *reinterpret_cast<SharedStorage*>(dynamic_shared());
    const u32 lane = thread_index() % 32, warp = thread_index() / 32;
    const u32 group = warp * GROUPS_A_WARP + lane / QG_LANES, column = lane % QG_LANES * 8;
    // The last rows of a causal sequence attend
    // to the most keys: they begin first.
    u32 cta = cta_index().x;
    const u32 part = cta % p.at.parts;
    cta /= p.at.parts;
    const u32 row_cta = p.at.row_ctas - 1 - cta % p.at.row_ctas;
    cta /= p.at.row_ctas;
    const u32 kv_head = cta % p.shape.kv_heads;
    griddepcontrol_launch_dependents();
    griddepcontrol_wait();
    const Sequence s = sequence_of(p, cta / p.shape.kv_heads);
    const u32 heads = p.shape.heads / p.shape.kv_heads;
    const u32 first_row = row_cta * QG_ROWS, all_rows = s.queries * heads;
    if (first_row >= all_rows) return;
    const u32 last_row = least(first_row + QG_ROWS, all_rows) - 1;

    const u32 part_first = part * p.at.part_keys;
    KeyRange keys = visible_keys_of(p, s, first_row / heads, last_row / heads);
    keys = {most(keys.first, part_first), least(keys.end, part_first + p.at.part_keys)};
    // The combine does not read parts without visible keys.
    if (p.at.parts > 1 && keys.first >= keys.end) return;
    // Keys that all rows attend to.
    const KeyRange visible_to_all = {visible_keys(p, s, last_row / heads).first, visible_keys(p, s, first_row / heads).end};

    RowState rows[QG_ROWS];
    const float factor = key_factor(p, kv_head);
#pragma unroll
    for (u32 r = 0; r < QG_ROWS; r++) {
        // Rows beyond the last repeat the last row.
        const u32 row = least(first_row + r, last_row);
        const u64 token = s.token + row / heads;
        const u32 head = kv_head * heads + row % heads;
        rows[r].visible = visible_keys(p, s, row / heads);
#if QG_BITS
        rows[r].mask = mask_row(p, s, head, row / heads);
#endif
        rows[r].row_max = minus_infinity();
        rows[r].row_sum = 0.0f;
#pragma unroll
        for (u32 i = 0; i < FEATURES; i++) rows[r].q[i] = rows[r].sums[i] = 0.0f;
#pragma unroll
        for (u32 e = 0; e < EIGHTS; e++) {
            const u32 c = column + e * EIGHT_PITCH;
            float(&eight)[8] = *reinterpret_cast<float(*)[8]>(&rows[r].q[e * 8]);
            if (c < p.shape.qk_dim) load_query(p, token * p.at.q_token + head * p.at.q_head + c, eight);
        }
#pragma unroll
        for (u32 i = 0; i < FEATURES; i++) rows[r].q[i] *= factor;
    }

    const u64 k_first = kv_head * p.at.k_head + column, v_first = kv_head * p.at.v_head + column;
    const bool aligned = p.shape.flags & QG_FLAG_KV_ALIGNED;
    // Aligned tiles: the assignment of keys to
    // groups does not depend on the rows of the CTA.
    for (u32 tile = keys.first / TILE_KEYS * TILE_KEYS; tile < keys.end; tile += TILE_KEYS) {
#if QG_BITS
        u32 present = keys_of_group(p, rows, keys, tile + group);
        if (ballot(present != 0) == 0) continue;
#else
        u32 present = 0;
#endif
        KeyEight k[UNROLL][EIGHTS];
        ValueEight v[UNROLL][EIGHTS];
#pragma unroll
        for (u32 u = 0; u < UNROLL; u++) {
            const u32 key = tile + u * GROUPS + group;
#pragma unroll
            for (u32 e = 0; e < EIGHTS; e++) k[u][e] = KeyEight::zeros(), v[u][e] = ValueEight::zeros();
#if QG_BITS
            if ((present & key_of_all(u)) == 0) continue;
            const KeyAddress at = address_of_key(p, s, key);
            if (!at.is_present) {
                present &= ~key_of_all(u);
                continue;
            }
#else
            if (key < keys.first || key >= keys.end) continue;
            const KeyAddress at = address_of_key(p, s, key);
            if (!at.is_present) continue;
            present |= 1u << u;
#endif
            const u64 k_row = at.page * p.at.k_page + at.row * p.at.k_token;
            const u64 v_row = at.page * p.at.v_page + at.row * p.at.v_token;
#pragma unroll
            for (u32 e = 0; e < EIGHTS; e++) {
                const u32 further = e * EIGHT_PITCH, c = column + further;
                if (c < p.shape.qk_dim) k[u][e] = KeyEight::load(p.at.k, p.at.k_scales, k_first + k_row + further, aligned);
                if (c < p.shape.v_dim) v[u][e] = ValueEight::load(p.at.v, p.at.v_scales, v_first + v_row + further, aligned);
            }
        }
#if QG_BITS
        const bool all_visible = ballot(present != ALL_KEYS) == 0;
#else
        const bool all_present = ballot(present != (1u << UNROLL) - 1) == 0;
        const bool all_visible = all_present && tile >= visible_to_all.first && tile + TILE_KEYS <= visible_to_all.end;
#endif
        if (all_visible)
            attend<true>(p, rows, k, v, tile + group, present);
        else
            attend<false>(p, rows, k, v, tile + group, present);
    }

#pragma unroll
    for (u32 r = 0; r < QG_ROWS; r++) {
#pragma unroll
        for (u32 e = 0; e < EIGHTS; e++) {
            f32x4* to = reinterpret_cast<f32x4*>(&shared.sums[group][r][column + e * EIGHT_PITCH]);
            const float(&sums)[8] = *reinterpret_cast<const float(*)[8]>(&rows[r].sums[e * 8]);
            st_shared(to, {sums[0], sums[1], sums[2], sums[3]});
            st_shared(to + 1, {sums[4], sums[5], sums[6], sums[7]});
        }
        if (column == 0) {
            st_shared(&shared.row_max[group][r], rows[r].row_max);
            st_shared(&shared.row_sum[group][r], rows[r].row_sum);
        }
    }
    cta_barrier();
    finish_rows(p, s, shared, kv_head, part, first_row, last_row);
}
