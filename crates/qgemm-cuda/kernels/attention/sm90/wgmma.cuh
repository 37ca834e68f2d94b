// Prefill on Hopper: consumer warpgroup with 64 queries. QKᵀ
// of a tile starts together with PV of the tile before. While
// one warpgroup computes its softmax, another one runs WGMMA.
#pragma once
#include "atoms/wgmma_attention.cuh"
#include "attention/online_softmax.cuh"
#include "attention/qk.cuh"
#include "attention/sm90/ring.cuh"

constexpr u32 SCORES = QG_KEYS / 2, SUMS = QG_V / 2, K_STEPS = QG_QK / 16, KEY_STEPS = QG_KEYS / 16;

// Registers of a lane: two query rows, eight apart.
struct Rows {
    float sums[SUMS];
    // P of the tile before. WGMMA owns these registers until it completes.
    u32 weights[KEY_STEPS][4];
    // Unscaled row_max, and the lane's partial sum.
    float row_max[2], row_sum[2];
    KeyRange visible[2];
#if QG_BITS
    // Mask rows of the two queries.
    const u8* mask[2];
#endif
};

// Consumer state across items.
struct Consumer {
    u32 warpgroup, lane;
    RingPosition k, v;
    // Factor from scores to base-2 exponents.
    float factor;
};

QG_DEVICE float number_of(u32 half) {
    return QG_KV == DTYPE_BF16 ? bf16_to_f32(half) : f16_to_f32(half);
}

// Warpgroups start their WGMMAs in turn (ping-pong).
QG_DEVICE void take_turn(const Consumer& own) {
    if constexpr (WARPGROUPS > 1) barrier_sync(1 + own.warpgroup, 256);
}
QG_DEVICE void pass_turn(const Consumer& own) {
    if constexpr (WARPGROUPS > 1) barrier_arrive(own.warpgroup + 1 == WARPGROUPS ? 1 : 2 + own.warpgroup, 256);
}

// Starts S = Q · Kᵀ of a tile.
QG_DEVICE void start_scores(float (&scores)[SCORES], const AttentionRing& ring, const Consumer& own) {
    const u64 q = wgmma_descriptor_128b(ring.q + own.warpgroup * (QG_QK / BOX) * Q_BOX_BYTES);
    const u64 k = wgmma_descriptor_128b(ring.k[own.k.stage]);
#pragma unroll
    for (u32 step = 0; step < K_STEPS; step++) {
        // Descriptor offsets are in units of 16 bytes.
        const u32 in_box = step % 4 * 2, q_at = step / 4 * Q_BOX_BYTES / 16 + in_box;
        const u32 k_at = step / 4 * KEYS_BOX_BYTES / 16 + in_box;
        if constexpr (QG_KV == DTYPE_F16) {
            if (step == 0)
                wgmma_scores_k16_f16<QG_KEYS, 0>(scores, q + q_at, k + k_at);
            else
                wgmma_scores_k16_f16<QG_KEYS, 1>(scores, q + q_at, k + k_at);
        } else {
            if (step == 0)
                wgmma_scores_k16_bf16<QG_KEYS, 0>(scores, q + q_at, k + k_at);
            else
                wgmma_scores_k16_bf16<QG_KEYS, 1>(scores, q + q_at, k + k_at);
        }
    }
    wgmma_commit_group();
}

// Starts O += P · V of the tile before.
QG_DEVICE void start_values(Rows& rows, const AttentionRing& ring, const Consumer& own) {
    const u64 v = wgmma_descriptor_128b_mn(ring.v[own.v.stage], KEYS_BOX_BYTES);
#pragma unroll
    for (u32 step = 0; step < KEY_STEPS; step++) {
        const u64 at = v + step * (16 * BOX * 2 / 16);
        if constexpr (QG_KV == DTYPE_F16)
            wgmma_values_k16_f16<QG_V>(rows.sums, rows.weights[step], at);
        else
            wgmma_values_k16_bf16<QG_V>(rows.sums, rows.weights[step], at);
    }
    wgmma_commit_group();
}

QG_DEVICE void rescale_sums(Rows& rows, const float (&rescale)[2]) {
    if (!needs_rescale(rescale)) return;
#pragma unroll
    for (u32 i = 0; i < SUMS; i++) rows.sums[i] *= rescale[i / 2 % 2];
}

// Slow path for V with infinities or NaN: adds each
// value only to the queries that attend to it.
QG_DEVICE void add_visible_values(Rows& rows, const TmaAttentionParams& params, const u8* values, u32 tile, u32 lane) {
#pragma unroll 1
    for (u32 step = 0; step < KEY_STEPS; step++) {
#pragma unroll 1
        for (u32 i = 0; i < 16; i++) {
            const u32 key = step * 16 + i;
            float weight[2];
            bool is_visible[2];
#pragma unroll
            for (u32 row = 0; row < 2; row++) {
                const u32 pair = i < 8 ? rows.weights[0][row] : rows.weights[0][2 + row];
                const u32 of_key = shfl_idx_u32(pair, lane / 4 * 4 + key % 8 / 2);
                weight[row] = number_of(key % 2 ? of_key >> 16 : of_key & 0xffffu);
#if QG_BITS
                const u32 first = tile + key / WORD_KEYS * WORD_KEYS;
                is_visible[row] = mask_bits(params.attention, rows.mask[row], rows.visible[row], first) >> key % WORD_KEYS & 1u;
#else
                is_visible[row] = tile + key >= rows.visible[row].first && tile + key < rows.visible[row].end;
#endif
            }
#pragma unroll
            for (u32 n = 0; n < QG_V / 8; n++) {
                const u8* at = values + n / 8 * KEYS_BOX_BYTES + key * 128 + ((n ^ key) & 7u) * 16 + lane % 4 * 4;
                const u32 pair = ld_shared(reinterpret_cast<const u32*>(at));
#pragma unroll
                for (u32 j = 0; j < 4; j++) {
                    const u32 half = j % 2 ? pair >> 16 : pair & 0xffffu;
                    const float value = number_of(half), sum = rows.sums[n * 4 + j];
                    // A probability may have been rounded to zero, and 0 · inf is NaN.
                    const float added = not_finite_pair(half) ? sum + value : fma_f32(weight[j / 2], value, sum);
                    rows.sums[n * 4 + j] = is_visible[j / 2] ? added : sum;
                }
            }
        }
        // Registers cannot be indexed at run
        // time: rotate the next step into place.
#pragma unroll
        for (u32 j = 0; j < 4; j++) {
            const u32 first = rows.weights[0][j];
#pragma unroll
            for (u32 i = 1; i < KEY_STEPS; i++) rows.weights[i - 1][j] = rows.weights[i][j];
            rows.weights[KEY_STEPS - 1][j] = first;
        }
    }
}

// Waits for the WGMMAs of `start_values`.
QG_DEVICE void finish_values(Rows& rows, AttentionRing& ring, Consumer& own) {
    wgmma_wait_group<0>();
    wgmma_fence_accumulators(rows.sums);
#pragma unroll
    for (u32 i = 0; i < KEY_STEPS; i++) wgmma_fence_operand(rows.weights[i]);
    AttentionRing::release(&ring.v_empty[own.v.stage], own.lane);
    RingPosition::next(own.v);
}

QG_DEVICE void wait_for_keys(AttentionRing& ring, const Consumer& own) {
    mbarrier_wait(&ring.k_full[own.k.stage], own.k.parity);
}

// Whether the tile needs masking. Call after its keys
// have arrived, because `absent` arrives with them.
QG_DEVICE bool is_mixed(const AttentionRing& ring, const Consumer& own, const KeysTile& tile) {
#if QG_PAGES
    u32 absent = 0;
#pragma unroll
    for (u32 i = 0; i < QG_KEYS / 32; i++) absent |= ld_shared(&ring.absent[slot_of(own.k)][i]);
    if (absent != 0) return true;
#endif
    return tile.is_mixed;
}

#if QG_PAGES
// Masks keys without a page.
QG_DEVICE void mask_absent(float (&scores)[SCORES], const u32* absent, u32 lane) {
#pragma unroll
    for (u32 word = 0; word < QG_KEYS / 32; word++) {
        const u32 bits = ld_shared(absent + word) >> lane % 4 * 2;
        if (ballot(bits != 0) == 0) continue;
#pragma unroll
        for (u32 i = 0; i < 16; i++) {
            if (bits >> (i / 4 * 8 + i % 2) & 1u) scores[word * 16 + i] = minus_infinity();
        }
    }
}
#endif

#if QG_BITS
// Mask bits of a tile for the lane's two queries.
struct MaskWords {
    u32 bits[2][QG_KEYS / WORD_KEYS];

    QG_DEVICE void load(MaskWords& words, const Rows& rows, const TmaAttentionParams& params, u32 tile) {
#pragma unroll
        for (u32 row = 0; row < 2; row++)
#pragma unroll
            for (u32 i = 0; i < QG_KEYS / WORD_KEYS; i++)
                words.bits[row][i] = mask_bits(params.attention, rows.mask[row], rows.visible[row], tile + i * WORD_KEYS);
    }
    // Masks the scores of hidden keys.
    QG_DEVICE void apply(const MaskWords& words, float (&scores)[SCORES], u32 lane) {
#pragma unroll
        for (u32 i = 0; i < SCORES; i++) {
            const u32 of_lane = words.bits[i / 2 % 2][i / 16] >> lane % 4 * 2;
            if (!(of_lane >> (i / 4 % 4 * 8 + i % 2) & 1u)) scores[i] = minus_infinity();
        }
    }
};
#endif

// One K tile: its softmax, and PV of the tile before if
// PENDING. Returns whether PV of this tile is pending:
// a MIXED tile with infinities or NaN is added at once.
template <bool MIXED, bool PENDING>
QG_DEVICE bool step(Rows& rows, AttentionRing& ring, Consumer& own, const TmaAttentionParams& params, u32 tile, bool is_last) {
    const AttentionParams& p = params.attention;
    float scores[SCORES];
#if QG_BITS
    MaskWords words;
    if constexpr (MIXED) MaskWords::load(words, rows, params, tile);
#endif
#if QG_PAGES
    const u32* absent = ring.absent[slot_of(own.k)];
#endif
    if constexpr (PENDING) mbarrier_wait(&ring.v_checked[own.v.stage], own.v.parity);
    take_turn(own);
    wgmma_fence();
    start_scores(scores, ring, own);
    if constexpr (PENDING) start_values(rows, ring, own);
    pass_turn(own);
    wgmma_wait_group<PENDING ? 1 : 0>();
    wgmma_fence_accumulators(scores);
    AttentionRing::release(&ring.k_empty[own.k.stage], own.lane);
    RingPosition::next(own.k);
    if constexpr (QG_BOUNDED) {
#pragma unroll
        for (u32 i = 0; i < SCORES; i++) scores[i] = bounded(p, scores[i] * p.shape.factor);
    }
    float rescale[2];
#if QG_BITS
    if constexpr (MIXED) MaskWords::apply(words, scores, own.lane);
#else
    if constexpr (MIXED) mask_scores(scores, rows.visible, tile);
#endif
#if QG_PAGES
    if constexpr (MIXED) mask_absent(scores, absent, own.lane);
#endif
    online_softmax(scores, rescale, rows.row_max, rows.row_sum, own.factor);
    // The compiler sinks most exp2 below this wait. Do not
    // force them above: with a branch between, they are slower,
    // as another warpgroup has the tensor cores by then.
    if constexpr (PENDING) finish_values(rows, ring, own);
    if (!is_last) wait_for_keys(ring, own);
    rescale_sums(rows, rescale);
#pragma unroll
    for (u32 i = 0; i < KEY_STEPS * 4; i++) {
        rows.weights[i / 4][i % 4] = rounded_pair(scores[2 * i], scores[2 * i + 1]);
    }
#pragma unroll
    for (u32 i = 0; i < KEY_STEPS; i++) wgmma_fence_operand(rows.weights[i]);
    if constexpr (MIXED) {
        mbarrier_wait(&ring.v_checked[own.v.stage], own.v.parity);
        u32 found = 0;
#pragma unroll
        for (u32 i = 0; i < INSPECTORS; i++) found |= ld_shared(&ring.not_finite[own.v.stage][i]);
        if (found != 0) {
            add_visible_values(rows, params, ring.v[own.v.stage], tile, own.lane);
            AttentionRing::release(&ring.v_empty[own.v.stage], own.lane);
            RingPosition::next(own.v);
            return false;
        }
    }
    return true;
}

// All K tiles of an item.
QG_DEVICE void attend(Rows& rows, AttentionRing& ring, Consumer& own, const TmaAttentionParams& params,
                      const AttentionItem& item) {
    bool pending = false;
    u32 i = 0;
    wait_for_keys(ring, own);
#pragma unroll 1
    while (i < item.tiles) {
        const KeysTile tile = AttentionItem::tile(item, i);
        const u32 last = item.tiles - 1;
        if (is_mixed(ring, own, tile)) {
            pending = pending ? step<true, true>(rows, ring, own, params, tile.key, i == last)
                              : step<true, false>(rows, ring, own, params, tile.key, i == last);
            i++;
            continue;
        }
        if (!pending) pending = step<false, false>(rows, ring, own, params, tile.key, i == last), i++;
#pragma unroll 1
        for (; i <= last; i++) {
            const KeysTile next = AttentionItem::tile(item, i);
            if (is_mixed(ring, own, next)) break;
            step<false, true>(rows, ring, own, params, next.key, i == last);
        }
    }
    AttentionRing::release(&ring.q_empty, own.lane);
    if (!pending) return;
    mbarrier_wait(&ring.v_checked[own.v.stage], own.v.parity);
    wgmma_fence();
    start_values(rows, ring, own);
    finish_values(rows, ring, own);
}
