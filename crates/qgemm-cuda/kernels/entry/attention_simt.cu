// FMA attention for any number of queries, with
// split-KV. A CTA has QG_ROWS rows (queries × heads of
// a KV head) and a part of the keys. A group of
// QG_LANES lanes holds a key, eight features a lane.
// Each group has its own online softmax over every
// GROUPS-th key; the CTA combines the groups in order.
#include "mainloop/attention_bits.cuh"
#include "mainloop/attention_finish.cuh"

constexpr u32 WARPS = QG_THREADS / 32, GROUPS_A_WARP = 32 / QG_LANES, GROUPS = WARPS * GROUPS_A_WARP;
constexpr u32 TILE_KEYS = QG_KEYS;
// Keys in flight per group.
constexpr u32 UNROLL = TILE_KEYS / GROUPS;
static_assert(UNROLL * GROUPS == TILE_KEYS && UNROLL <= 32, "every group has as many keys of a tile");
constexpr u32 COLUMNS = QG_LANES * 8;

// Eight features of a key or value, with the
// scale of their block if the format has scales.
struct KvEight {
    using Stored = Eight<QG_KV>;
    Stored stored;
    float scale;

    QG_DEVICE KvEight zeros() {
        return {Stored::zeros(), 0.0f};
    }

    QG_DEVICE KvEight load(u64 numbers, u64 scales, u64 element, bool aligned) {
        const u8* at = reinterpret_cast<const u8*>(numbers) + Stored::offset_of(element);
        KvEight eight = {Stored::load(at, aligned), 1.0f};
        if constexpr (has_scales(QG_KV))
            eight.scale = f16_to_f32(ld_global_u16(reinterpret_cast<const u8*>(scales) + element / KV_BLOCK * 2));
        return eight;
    }

    QG_DEVICE float number(const KvEight& eight, u32 i) {
        const float number = Stored::number(eight.stored, i);
        return has_scales(QG_KV) ? number * eight.scale : number;
    }
};

// Online softmax state of a row in one group.
struct RowState {
    float q[8], sums[8];
    float row_max, row_sum;
    KeyRange visible;
#if QG_BITS
    const u8* mask;
#endif
};

struct SharedStorage {
    float sums[GROUPS][QG_ROWS][COLUMNS];
    float row_max[GROUPS][QG_ROWS], row_sum[GROUPS][QG_ROWS];
};
static_assert(sizeof(SharedStorage) == QG_SHARED_BYTES, "the host computes another size");

#if QG_BITS
// Bit r * UNROLL + u: row r attends to key u of the group.
static_assert(QG_ROWS * UNROLL <= 32, "a word says which rows see which keys");
constexpr u32 ALL_KEYS = QG_ROWS * UNROLL == 32 ? ~0u : (1u << QG_ROWS * UNROLL % 32) - 1;

// Bits of key `u` for all rows.
QG_DEVICE constexpr u32 key_of_all(u32 u) {
    u32 bits = 0;
    for (u32 r = 0; r < QG_ROWS; r++) bits |= 1u << (r * UNROLL + u);
    return bits;
}

// Mask bits of the group's keys,
// within `keys`, for all rows.
QG_DEVICE u32 keys_of_group(const KernelParams& p, const RowState (&rows)[QG_ROWS], const KeyRange& keys, u32 first_key) {
    u32 visible = 0;
#pragma unroll
    for (u32 u = 0; u < UNROLL; u++) {
        const u32 key = first_key + u * GROUPS;
        if (key < keys.first || key >= keys.end) continue;
#pragma unroll
        for (u32 r = 0; r < QG_ROWS; r++) {
            const u32 bits = mask_bits(p, rows[r].mask, rows[r].visible, key / WORD_KEYS * WORD_KEYS);
            visible |= (bits >> key % WORD_KEYS & 1u) << (r * UNROLL + u);
        }
    }
    return visible;
}
#endif

// Online softmax step: UNROLL keys and values
// for every row. ALL: every row attends to
// every key. `present`: keys that exist, or
// with a mask the bits of `keys_of_group`.
template <bool ALL>
QG_DEVICE void attend(const AttentionParams& p, RowState (&rows)[QG_ROWS], const KvEight (&k)[UNROLL],
                      const KvEight (&v)[UNROLL], u32 first_key, u32 present) {
    float scores[QG_ROWS][UNROLL];
#pragma unroll
    for (u32 u = 0; u < UNROLL; u++) {
        float numbers[8];
#pragma unroll
        for (u32 i = 0; i < 8; i++) numbers[i] = KvEight::number(k[u], i);
#pragma unroll
        for (u32 r = 0; r < QG_ROWS; r++) {
            float sum = 0.0f;
#pragma unroll
            for (u32 i = 0; i < 8; i++) sum = fma_f32(rows[r].q[i], numbers[i], sum);
#pragma unroll
            for (u32 mask = QG_LANES / 2; mask > 0; mask /= 2) sum += shfl_xor(sum, mask);
            scores[r][u] = sum;
        }
    }
    const auto is_visible = [&](u32 r, u32 u) -> bool {
#if QG_BITS
        return present >> (r * UNROLL + u) & 1u;
#else
        const RowState& row = rows[r];
        const u32 key = first_key + u * GROUPS;
        return (present >> u & 1u) && key >= row.visible.first && key < row.visible.end;
#endif
    };
#pragma unroll
    for (u32 r = 0; r < QG_ROWS; r++) {
        RowState& row = rows[r];
        float row_max = row.row_max;
#pragma unroll
        for (u32 u = 0; u < UNROLL; u++) {
            scores[r][u] = bounded(p, scores[r][u]);
            if (!ALL && !is_visible(r, u)) scores[r][u] = minus_infinity();
            row_max = scores[r][u] > row_max ? scores[r][u] : row_max;
        }
        // Avoid (−inf) − (−inf) = NaN when a row is fully masked.
        const float base = row_max == minus_infinity() ? 0.0f : row_max;
        const float rescale = ex2_approx(row.row_max - base);
        row.row_max = row_max;
        row.row_sum *= rescale;
#pragma unroll
        for (u32 u = 0; u < UNROLL; u++) {
            scores[r][u] = ex2_approx(scores[r][u] - base);
            row.row_sum += scores[r][u];
        }
#pragma unroll
        for (u32 i = 0; i < 8; i++) row.sums[i] *= rescale;
    }
#pragma unroll
    for (u32 u = 0; u < UNROLL; u++) {
        float numbers[8];
#pragma unroll
        for (u32 i = 0; i < 8; i++) numbers[i] = KvEight::number(v[u], i);
#pragma unroll
        for (u32 r = 0; r < QG_ROWS; r++) {
            // 0 · NaN is NaN: skip masked values.
            if (!ALL && !is_visible(r, u)) continue;
#pragma unroll
            for (u32 i = 0; i < 8; i++) rows[r].sums[i] = fma_f32(scores[r][u], numbers[i], rows[r].sums[i]);
        }
    }
}

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
        for (u32 i = 0; i < 8; i++) rows[r].q[i] = rows[r].sums[i] = 0.0f;
        if (column < p.shape.qk_dim) load_query(p, token * p.at.q_token + head * p.at.q_head + column, rows[r].q);
#pragma unroll
        for (u32 i = 0; i < 8; i++) rows[r].q[i] *= factor;
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
        KvEight k[UNROLL], v[UNROLL];
#pragma unroll
        for (u32 u = 0; u < UNROLL; u++) {
            const u32 key = tile + u * GROUPS + group;
            k[u] = v[u] = KvEight::zeros();
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
            if (column < p.shape.qk_dim) k[u] = KvEight::load(p.at.k, p.at.k_scales, k_first + k_row, aligned);
            if (column < p.shape.v_dim) v[u] = KvEight::load(p.at.v, p.at.v_scales, v_first + v_row, aligned);
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
        f32x4* to = reinterpret_cast<f32x4*>(&shared.sums[group][r][column]);
        const float(&sums)[8] = rows[r].sums;
        st_shared(to, {sums[0], sums[1], sums[2], sums[3]});
        st_shared(to + 1, {sums[4], sums[5], sums[6], sums[7]});
        if (column == 0) {
            st_shared(&shared.row_max[group][r], rows[r].row_max);
            st_shared(&shared.row_sum[group][r], rows[r].row_sum);
        }
    }
    cta_barrier();
    // One warp per row, eight columns per lane.
    for (u32 r = warp; r < QG_ROWS && first_row + r <= last_row; r += WARPS) {
        float row_max = minus_infinity(), row_sum = 0.0f;
        float sums[8] = {};
        for (u32 g = 0; g < GROUPS; g++) {
            const float other = ld_shared(&shared.row_max[g][r]);
            row_max = other > row_max ? other : row_max;
        }
        const float base = row_max == minus_infinity() ? 0.0f : row_max;
        const u32 c = lane * 8;
        for (u32 g = 0; g < GROUPS; g++) {
            const float weight = ex2_approx(ld_shared(&shared.row_max[g][r]) - base);
            row_sum += weight * ld_shared(&shared.row_sum[g][r]);
            if (c >= COLUMNS) continue;
            const f32x4* from = reinterpret_cast<const f32x4*>(&shared.sums[g][r][c]);
            const f32x4 low = ld_shared(from), high = ld_shared(from + 1);
            const float others[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
            for (u32 i = 0; i < 8; i++) sums[i] = fma_f32(weight, others[i], sums[i]);
        }
        const u64 token = s.token + (first_row + r) / heads;
        const u32 head = kv_head * heads + (first_row + r) % heads;
        if (p.at.parts > 1) {
            float* to = partial_result(p, token, head, part);
            if (lane == 0) st_global_f32x4(reinterpret_cast<f32x4*>(to), {row_max, row_sum, 0.0f, 0.0f});
            if (c < p.shape.v_dim) {
                st_global_f32x4(reinterpret_cast<f32x4*>(to + 4 + c), {sums[0], sums[1], sums[2], sums[3]});
                st_global_f32x4(reinterpret_cast<f32x4*>(to + 8 + c), {sums[4], sums[5], sums[6], sums[7]});
            }
            continue;
        }
        const RowEnd end = end_of_row(p, head, row_max, row_sum, value_factor(p, kv_head));
#pragma unroll
        for (u32 i = 0; i < 8; i++) sums[i] *= end.scale;
        if (c < p.shape.v_dim) store_results(p, token * p.at.d_token + head * p.at.d_head + c, sums);
        if (lane == 0) store_lse(p, token, head, end);
    }
}
