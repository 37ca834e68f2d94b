// FMA attention: keys and values in registers, online softmax
// state of rows, and the end of the rows.
#pragma once
#include "attention/finish.cuh"
#include "attention/mask.cuh"
#include "attention/numbers.cuh"
#include "attention/partial_result.cuh"

constexpr u32 WARPS = QG_THREADS / 32, GROUPS_A_WARP = 32 / QG_LANES, GROUPS = WARPS * GROUPS_A_WARP;
constexpr u32 TILE_KEYS = QG_KEYS;
// Keys in flight per group.
constexpr u32 UNROLL = TILE_KEYS / GROUPS;
static_assert(UNROLL * GROUPS == TILE_KEYS && UNROLL <= 32, "every group has as many keys of a tile");
// Features of a lane, in groups of eight that are
// QG_LANES * 8 features apart.
constexpr u32 FEATURES = QG_LANE_FEATURES, EIGHTS = FEATURES / 8, EIGHT_PITCH = QG_LANES * 8;
constexpr u32 COLUMNS = QG_LANES * FEATURES;

// Eight features of a key or value, with the
// scale of their block if the format has scales.
template <u32 FORMAT>
struct KvEight {
    using Stored = Eight<FORMAT>;
    Stored stored;
    float scale;

    QG_DEVICE KvEight zeros() {
        return {Stored::zeros(), 0.0f};
    }

    QG_DEVICE KvEight load(u64 numbers, u64 scales, u64 element, bool aligned) {
        const u8* at = reinterpret_cast<const u8*>(numbers) + Stored::offset_of(element);
        KvEight eight = {Stored::load(at, aligned), 1.0f};
        if constexpr (has_scales(FORMAT))
            eight.scale = f16_to_f32(ld_global_u16(reinterpret_cast<const u8*>(scales) + element / KV_BLOCK * 2));
        return eight;
    }

    QG_DEVICE float number(const KvEight& eight, u32 i) {
        const float number = Stored::number(eight.stored, i);
        return has_scales(FORMAT) ? number * eight.scale : number;
    }
};

using KeyEight = KvEight<QG_KV>;
using ValueEight = KvEight<QG_V_KV>;

// Online softmax state of a row in one group.
struct RowState {
    float q[FEATURES], sums[FEATURES];
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

// Combines the groups of every row in order, and stores
// the row or its partial result.
QG_DEVICE void finish_rows(const KernelParams& p, const Sequence& s, const SharedStorage& shared, u32 kv_head, u32 part,
                           u32 first_row, u32 last_row) {
    const u32 lane = thread_index() % 32, warp = thread_index() / 32, heads = p.shape.heads / p.shape.kv_heads;
    // One warp per row, eight columns per lane at a time.
    for (u32 r = warp; r < QG_ROWS && first_row + r <= last_row; r += WARPS) {
        float row_max = minus_infinity();
        for (u32 g = 0; g < GROUPS; g++) {
            const float other = ld_shared(&shared.row_max[g][r]);
            row_max = other > row_max ? other : row_max;
        }
        const float base = row_max == minus_infinity() ? 0.0f : row_max;
        const u64 token = s.token + (first_row + r) / heads;
        const u32 head = kv_head * heads + (first_row + r) % heads;
#pragma unroll
        for (u32 first = 0; first < COLUMNS; first += 256) {
            const u32 c = first + lane * 8;
            float row_sum = 0.0f, sums[8] = {};
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
            if (p.at.parts > 1) {
                float* to = partial_result(p, token, head, part);
                if (c == 0) st_global_f32x4(reinterpret_cast<f32x4*>(to), {row_max, row_sum, 0.0f, 0.0f});
                if (c < p.shape.v_dim) {
                    st_global_f32x4(reinterpret_cast<f32x4*>(to + 4 + c), {sums[0], sums[1], sums[2], sums[3]});
                    st_global_f32x4(reinterpret_cast<f32x4*>(to + 8 + c), {sums[4], sums[5], sums[6], sums[7]});
                }
                continue;
            }
            const RowEnd end = end_of_row(p, head, row_max, row_sum, value_factor(p, kv_head));
#pragma unroll
            for (u32 i = 0; i < 8; i++) sums[i] *= end.scale;
            if (c < p.shape.v_dim) store_results(p, token, head, c, sums);
            if (c == 0) store_lse(p, token, head, end);
        }
    }
}
