// Adds the results of the parts of the keys up, in their order: a warp a query and head, eight columns a lane.
#include "mainloop/attention_keys.cuh"

extern "C" __global__ void __launch_bounds__(QG_THREADS)
    qg_attention_combine(const __grid_constant__ AttentionParams p) {
    const u32 lane = thread_index() % 32;
    const u64 place = (u64)cta_index().x * (QG_THREADS / 32) + thread_index() / 32;
    griddepcontrol_launch_dependents();
    griddepcontrol_wait();
    const u32 head = place % p.shape.heads;
    const u64 queries = place / p.shape.heads;
    const u32 query = queries % p.shape.most_queries;
    if (queries / p.shape.most_queries >= p.shape.sequences) return;
    const Sequence s = sequence_of(p, queries / p.shape.most_queries);
    if (query >= s.queries) return;
    const u64 token = s.token + query;
    const KeyRange seen = keys_seen(p, s, query);
    const bool sees = seen.first < seen.end;
    const u32 first = sees ? seen.first / p.at.part_keys : 0;
    const u32 end = sees ? (seen.end - 1) / p.at.part_keys + 1 : 0;
    float largest = minus_infinity(), total = 0.0f;
    for (u32 part = first; part < end; part++) {
        const float other = ld_global_cg_f32(partial_result(p, token, head, part));
        largest = other > largest ? other : largest;
    }
    const float base = largest == minus_infinity() ? 0.0f : largest;
    float sums[8] = {};
    const u32 c = lane * 8;
    for (u32 part = first; part < end; part++) {
        const float* from = partial_result(p, token, head, part);
        const f32x4 row = ld_global_cg_f32x4(reinterpret_cast<const f32x4*>(from));
        const float weight = ex2_approx(row.x - base);
        total += weight * row.y;
        if (c >= p.shape.v_dim) continue;
        const f32x4 low = ld_global_cg_f32x4(reinterpret_cast<const f32x4*>(from + 4 + c));
        const f32x4 high = ld_global_cg_f32x4(reinterpret_cast<const f32x4*>(from + 8 + c));
        const float others[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
        for (u32 i = 0; i < 8; i++) sums[i] = fma_f32(weight, others[i], sums[i]);
    }
    const u32 kv_head = head / (p.shape.heads / p.shape.kv_heads);
    const float scale = total == 0.0f ? 0.0f : value_factor(p, kv_head) / total;
#pragma unroll
    for (u32 i = 0; i < 8; i++) sums[i] *= scale;
    if (c < p.shape.v_dim) store_results(p, token * p.at.d_token + head * p.at.d_head + c, sums);
    if (lane == 0 && p.shape.flags & QG_FLAG_LSE)
        st_global_f32(reinterpret_cast<float*>(p.at.lse) + token * p.shape.heads + head, log_sum_exp(largest, total));
}
