// Prefill with cp.async: tile shapes, and the work of a CTA.
#pragma once
#include "attention/mask_tile.cuh"
#include "attention/problem.cuh"

constexpr u32 WARPS = QG_THREADS / 32, ROW_TILES = 2, WARP_ROWS = ROW_TILES * 16, ROWS = WARPS * WARP_ROWS;
constexpr u32 MMA_K = 16, MMA_N = 8;
constexpr u32 QK_PITCH = QG_QK * 2, V_PITCH = QG_V * 2;
constexpr u32 SCORES = QG_KEYS / 2, SUMS = QG_V / 2;
static_assert(QG_QK % 64 == 0 && QG_V % 64 == 0, "eight chunks are exchanged");
static_assert(QG_KEYS <= 64, "two words say which keys have a page");

struct CpAsyncParams {
    KernelParams attention;
    // Heads that CTAs process together, so that their K and V stay in L2.
    u32 heads_together;
    u32 reserved;
};

// Work of a CTA. It is reloaded from shared memory
// on each use; registers are for accumulators.
struct Work {
    const u8 *k, *v;
    Sequence s;
    u32 head, first_query, last_query;
    // Union and intersection of the keys visible to the queries.
    KeyRange keys, visible_to_all;

    QG_DEVICE Work load(const Work& shared) {
        const Sequence& s = shared.s;
        return {ld_shared(&shared.k),
                ld_shared(&shared.v),
                {ld_shared(&s.index), ld_shared(&s.token), ld_shared(&s.queries), ld_shared(&s.row), ld_shared(&s.keys)},
                ld_shared(&shared.head),
                ld_shared(&shared.first_query),
                ld_shared(&shared.last_query),
                {ld_shared(&shared.keys.first), ld_shared(&shared.keys.end)},
                {ld_shared(&shared.visible_to_all.first), ld_shared(&shared.visible_to_all.end)}};
    }
    QG_DEVICE void store(Work& shared, const Work& work) {
        st_shared(&shared.k, work.k), st_shared(&shared.v, work.v);
        Sequence& s = shared.s;
        st_shared(&s.index, work.s.index), st_shared(&s.token, work.s.token), st_shared(&s.queries, work.s.queries);
        st_shared(&s.row, work.s.row), st_shared(&s.keys, work.s.keys);
        st_shared(&shared.head, work.head);
        st_shared(&shared.first_query, work.first_query), st_shared(&shared.last_query, work.last_query);
        st_shared(&shared.keys.first, work.keys.first), st_shared(&shared.keys.end, work.keys.end);
        st_shared(&shared.visible_to_all.first, work.visible_to_all.first), st_shared(&shared.visible_to_all.end, work.visible_to_all.end);
    }
};

struct SharedStorage {
    alignas(16) u8 q[ROWS * QK_PITCH];
    u8 k[QG_KEYS * QK_PITCH];
    u8 v[QG_KEYS * V_PITCH];
    // Bits of keys that have a page.
    u32 present[2];
    // Whether V of some mixed tile has infinities or NaN.
    u32 not_finite;
#if QG_BITS
    TileBits<ROWS> tiles;
#endif
    Work work;
};
static_assert(sizeof(SharedStorage) == QG_SHARED_BYTES, "the host computes another size");

// Factor from scores to base-2 exponents. With
// a soft cap, scores already are exponents.
QG_DEVICE float factor(const AttentionParams& p) {
    return QG_BOUNDED ? 1.0f : p.shape.factor;
}

// Registers of a lane: two query rows
// of each row tile, eight apart.
struct Rows {
    float sums[ROW_TILES][SUMS];
    float row_max[ROW_TILES][2], row_sum[ROW_TILES][2];
};

// Work of a CTA; false if it has none. Within a
// group of heads, the last queries of causal
// sequences attend to the most keys and begin first.
QG_DEVICE bool work_of(const CpAsyncParams& params, u32 cta, Work& work) {
    const KernelParams& p = params.attention;
    const u32 of_head = p.shape.sequences * p.at.row_ctas;
    const u32 first_head = cta / (params.heads_together * of_head) * params.heads_together;
    const u32 heads = least(params.heads_together, p.shape.heads - first_head);
    cta -= first_head * of_head;
    work.head = first_head + cta % heads;
    cta /= heads;
    work.first_query = (p.at.row_ctas - 1 - cta / p.shape.sequences) * ROWS;
    work.s = sequence_of(p, cta % p.shape.sequences);
    if (work.first_query >= work.s.queries) return false;
    work.last_query = least(work.first_query + ROWS, work.s.queries) - 1;
    const u32 kv_head = work.head / (p.shape.heads / p.shape.kv_heads);
    work.keys = visible_keys_of(p, work.s, work.first_query, work.last_query);
    work.visible_to_all = {visible_keys(p, work.s, work.last_query).first, visible_keys(p, work.s, work.first_query).end};
    work.k = reinterpret_cast<const u8*>(p.at.k) + kv_head * p.at.k_head * 2;
    work.v = reinterpret_cast<const u8*>(p.at.v) + kv_head * p.at.v_head * 2;
    return true;
}
