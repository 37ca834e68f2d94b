// Decode attention: end of a CTA. Warps and parts of the
// keys (split-KV) are combined in order.
#pragma once
#include "attention/sm80/decode_softmax.cuh"
#include "attention/sm80/decode_store.cuh"

// Split-KV combine: columns per lane, and warps
// per row. Fewer warps have more registers each.
constexpr u32 LANE_COLUMNS = IS_TRANSPOSED || QG_V == 64 ? 2 : 4, ROW_WARPS = QG_V / LANE_COLUMNS / 32;

// Shared memory of the split-KV combine.
struct SplitKvCombine {
    u32 is_last;
    alignas(16) f32x4 weights[WARPS][PartSums<LANE_COLUMNS>::BATCH / 2];
};
constexpr u32 COMBINE_AT = (sizeof(WarpResult) + 15) / 16 * 16;
static_assert(COMBINE_AT + sizeof(SplitKvCombine) <= WARPS * RING_BYTES, "an ending takes the place of rings");
// The saved work follows the rings.
constexpr u32 SAVED_AT = ALL_RINGS;
static_assert(QG_SHARED_BYTES == SAVED_AT + SAVED_BYTES, "the host computes another size");

// Stores the lane's rows to the result of its warp.
QG_DEVICE void store_result(WarpResult& own, LaneRows& rows) {
    const u32 lane = thread_index() % 32, g = lane / 4, t = lane % 4;
#pragma unroll
    for (u32 i = 0; i < 2; i++) {
#pragma unroll
        for (u32 peer = FIRST_PEER; peer <= LAST_PEER; peer *= 2) rows.row_sum[i] += shfl_xor(rows.row_sum[i], peer);
        const u32 row = lane_row(i);
        if (IS_TRANSPOSED ? g == 0 : t == 0) st_shared(&own.stats[row], f32x2{rows.row_max[i], rows.row_sum[i]});
#pragma unroll
        for (u32 n = 0; n < SUM_TILES; n++) {
            const u32 first = IS_TRANSPOSED ? i : 2 * i, second = IS_TRANSPOSED ? i + 2 : 2 * i + 1;
            if constexpr (IS_TRANSPOSED && !IS_CODES) {
                st_shared(&own.sums[row][lane_feature(n, first)], rows.sums[n][first]);
                st_shared(&own.sums[row][lane_feature(n, second)], rows.sums[n][second]);
            } else {
                st_shared(reinterpret_cast<f32x2*>(&own.sums[row][lane_feature(n, first)]), {rows.sums[n][first], rows.sums[n][second]});
            }
        }
    }
}

// Combines the warps' results. The last of the CTAs that
// share rows combines their parts, too.
QG_DEVICE void finish_cta(const KernelParams& p, const u32* saved) {
    const u32 lane = thread_index() % 32, warp = thread_index() / 32;
    const auto result_of = [&](u32 w, u32 head) -> const WarpResult& {
        w = w * KV_HEADS + head;
        return *reinterpret_cast<const WarpResult*>(reinterpret_cast<const u8*>(dynamic_shared()) + w * RING_BYTES);
    };
    const SavedWork of_cta = SavedWork::from(saved);
    const bool is_partial = of_cta.is_partial(p);
    // Head of the pair that row `i` belongs to: rows
    // of the first head, then rows of the second.
    const auto head_of = [&](u32 i) -> u32 { return KV_HEADS > 1 && i >= of_cta.rows; };
    // Four columns a thread.
    constexpr u32 COLUMNS = 4, ROW_ITEMS = QG_V / COLUMNS, ROW_THREADS = ROW_ITEMS < QG_THREADS ? ROW_ITEMS : QG_THREADS;
    constexpr u32 PASSES = ROW_ITEMS / ROW_THREADS;
#pragma unroll 1
    for (u32 i = thread_index() / ROW_THREADS * PASSES; i < KV_HEADS * of_cta.rows * PASSES; i += QG_THREADS / ROW_THREADS) {
        const u32 head = head_of(i / PASSES), row = i / PASSES - head * of_cta.rows;
        const SavedWork end = of_cta.of_head(head);
        const u32 c = (i % PASSES * ROW_THREADS + thread_index() % ROW_THREADS) * COLUMNS;
        f32x2 stats[KEY_GROUPS];
        f32x4 others[KEY_GROUPS];
#pragma unroll
        for (u32 w = 0; w < KEY_GROUPS; w++) stats[w] = ld_shared(&result_of(w, head).stats[row]);
#pragma unroll
        for (u32 w = 0; w < KEY_GROUPS; w++) others[w] = ld_shared(reinterpret_cast<const f32x4*>(&result_of(w, head).sums[row][c]));
        float cta_max = minus_infinity(), cta_sum = 0.0f;
#pragma unroll
        for (u32 w = 0; w < KEY_GROUPS; w++) cta_max = stats[w].x > cta_max ? stats[w].x : cta_max;
        const float base = cta_max == minus_infinity() ? 0.0f : cta_max;
        float values[COLUMNS] = {};
#pragma unroll
        for (u32 w = 0; w < KEY_GROUPS; w++) {
            const float weight = ex2_approx(stats[w].x - base);
            cta_sum += weight * stats[w].y;
            const float of_warp[COLUMNS] = {others[w].x, others[w].y, others[w].z, others[w].w};
#pragma unroll
            for (u32 j = 0; j < COLUMNS; j++) values[j] = fma_f32(weight, of_warp[j], values[j]);
        }
        if (is_partial) {
            const PartResults results = end.results_of(p, row);
            f32x4 *header = results.headers + end.part, *sums = reinterpret_cast<f32x4*>(results.sums(end.part, c));
            if (!SavedWork::combines_in_kernel(p)) {
                header = end.result_of_launch(p, row);
                sums = header + 1 + c / 4;
            }
            if (c < p.shape.v_dim) st_global_f32x4(sums, {values[0], values[1], values[2], values[3]});
            if (c == 0) st_global_f32x4(header, {cta_max, cta_sum, 0.0f, 0.0f});
        } else {
            store_row(p, end, row, c, values, cta_max, cta_sum);
        }
    }
    if (!is_partial || !SavedWork::combines_in_kernel(p)) return;
    u32* counter = reinterpret_cast<u32*>(p.at.workspace) + of_cta.tile;
    SplitKvCombine& ending = *reinterpret_cast<SplitKvCombine*>(reinterpret_cast<u8*>(dynamic_shared()) + COMBINE_AT);
    // The first row that a warp combines:
    // its parts and partial results.
    PartRange of_row = {};
    PartResults results = {};
    const auto look_up = [&](u32 i) {
        const u32 head = head_of(i / ROW_WARPS), row = i / ROW_WARPS - head * of_cta.rows;
        if (row >= of_cta.rows) return;
        of_row = of_cta.parts_of_row(p, row);
        results = of_cta.of_head(head).results_of(p, row);
    };
    // The last warp arrives for the CTA, so it looks
    // up before. With few rows it was idle above.
    if (warp == WARPS - 1) look_up(warp);
    if (!is_last_of(counter, of_cta.end_part - of_cta.first_part, &ending.is_last, [&] { look_up(warp); })) return;
#pragma unroll 1
    for (u32 i = warp; i < KV_HEADS * of_cta.rows * ROW_WARPS; i += WARPS) {
        if (i != warp) look_up(i);
        const u32 c = (i % ROW_WARPS * 32 + lane) * LANE_COLUMNS;
        const auto sums_of = PartSums<LANE_COLUMNS>::of(results, of_row, c, c < p.shape.v_dim, ending.weights[warp]);
        const u32 head = head_of(i / ROW_WARPS);
        store_row(p, of_cta.of_head(head), i / ROW_WARPS - head * of_cta.rows, c, sums_of.sums, sums_of.row_max, sums_of.row_sum);
    }
}
