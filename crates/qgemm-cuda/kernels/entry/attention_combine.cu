// Split-KV combine as a separate launch: one CTA per query,
// head and 256 value features. Warps take parts in turn, a lane has eight columns.
// The order of additions depends only on the number of parts
// and matches `PartSums` (attention/split_kv.cuh).
// Several parts are loaded at once to hide latency.
#include "attention/finish.cuh"
#include "attention/partial_result.cuh"

constexpr u32 WARPS = QG_THREADS / 32, LANE_COLUMNS = 8, CTA_COLUMNS = 32 * LANE_COLUMNS, AT_ONCE = 4;

struct SharedStorage {
    float row_max[WARPS], row_sum[WARPS];
    alignas(16) float sums[WARPS][CTA_COLUMNS];
};
static_assert(sizeof(SharedStorage) == QG_SHARED_BYTES, "the host computes another size");

extern "C" __global__ void __launch_bounds__(QG_THREADS)
    qg_attention_combine(const __grid_constant__ AttentionParams p) {
    SharedStorage& shared = *reinterpret_cast<SharedStorage*>(dynamic_shared());
    const u32 lane = thread_index() % 32, warp = thread_index() / 32;
    griddepcontrol_launch_dependents();
    griddepcontrol_wait();
    const u32 head = cta_index().x % p.shape.heads, queries = cta_index().x / p.shape.heads;
    const u32 query = queries % p.shape.most_queries;
    const Sequence s = sequence_of(p, queries / p.shape.most_queries);
    if (query >= s.queries) return;
    const u64 token = s.token + query;
    const KeyRange visible = visible_keys(p, s, query);
    const bool any_visible = visible.first < visible.end;
    const u32 first = any_visible ? visible.first / p.at.part_keys : 0;
    const u32 end = any_visible ? (visible.end - 1) / p.at.part_keys + 1 : 0;

    float row_max = minus_infinity();
    const auto update_max = [&](float other) { row_max = other > row_max ? other : row_max; };
    for (u32 part = first + thread_index(); part < end; part += QG_THREADS)
        update_max(ld_global_cg_f32(partial_result(p, token, head, part)));
#pragma unroll
    for (u32 mask = 16; mask > 0; mask /= 2) update_max(shfl_xor(row_max, mask));
    if (lane == 0) st_shared(&shared.row_max[warp], row_max);
    cta_barrier();
#pragma unroll
    for (u32 w = 0; w < WARPS; w++) update_max(ld_shared(&shared.row_max[w]));
    const float base = row_max == minus_infinity() ? 0.0f : row_max;

    float row_sum = 0.0f, sums[LANE_COLUMNS] = {};
    const u32 own_column = lane * LANE_COLUMNS, c = cta_index().y * CTA_COLUMNS + own_column;
    const bool has_columns = c < p.shape.v_dim;
    for (u32 part = first + warp; part < end; part += WARPS * AT_ONCE) {
        f32x4 row[AT_ONCE], low[AT_ONCE], high[AT_ONCE];
#pragma unroll
        for (u32 i = 0; i < AT_ONCE; i++) {
            // Parts beyond the end load the
            // last part; the result is unused.
            const float* from = partial_result(p, token, head, least(part + i * WARPS, end - 1));
            row[i] = ld_global_cg_f32x4(reinterpret_cast<const f32x4*>(from));
            low[i] = high[i] = {};
            if (!has_columns) continue;
            low[i] = ld_global_cg_f32x4(reinterpret_cast<const f32x4*>(from + 4 + c));
            high[i] = ld_global_cg_f32x4(reinterpret_cast<const f32x4*>(from + 8 + c));
        }
#pragma unroll
        for (u32 i = 0; i < AT_ONCE; i++) {
            if (part + i * WARPS >= end) continue;
            const float weight = ex2_approx(row[i].x - base);
            row_sum = fma_f32(weight, row[i].y, row_sum);
            const float others[LANE_COLUMNS] = {low[i].x,  low[i].y,  low[i].z,  low[i].w,
                                                high[i].x, high[i].y, high[i].z, high[i].w};
#pragma unroll
            for (u32 j = 0; j < LANE_COLUMNS; j++) sums[j] = fma_f32(weight, others[j], sums[j]);
        }
    }
    if (lane == 0) st_shared(&shared.row_sum[warp], row_sum);
    f32x4* own = reinterpret_cast<f32x4*>(&shared.sums[warp][own_column]);
    st_shared(own, f32x4{sums[0], sums[1], sums[2], sums[3]});
    st_shared(own + 1, f32x4{sums[4], sums[5], sums[6], sums[7]});
    cta_barrier();
    if (warp != 0) return;
#pragma unroll
    for (u32 w = 1; w < WARPS; w++) {
        row_sum += ld_shared(&shared.row_sum[w]);
        const f32x4* theirs = reinterpret_cast<const f32x4*>(&shared.sums[w][own_column]);
        const f32x4 low = ld_shared(theirs), high = ld_shared(theirs + 1);
        const float others[LANE_COLUMNS] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
        for (u32 j = 0; j < LANE_COLUMNS; j++) sums[j] += others[j];
    }
    const u32 kv_head = head / (p.shape.heads / p.shape.kv_heads);
    const RowEnd end_of = end_of_row(p, head, row_max, row_sum, value_factor(p, kv_head));
#pragma unroll
    for (u32 i = 0; i < LANE_COLUMNS; i++) sums[i] *= end_of.scale;
    if (has_columns) store_results(p, token, head, c, sums);
    if (c == 0) store_lse(p, token, head, end_of);
}
