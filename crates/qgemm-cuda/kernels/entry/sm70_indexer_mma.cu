// Sparse-attention indexer scores with MMA. A warp holds its
// keys in registers as rows; the heads of one query after
// another pass through shared memory as columns. Weighted
// ReLU sums over columns are computed in the same warp.
#include "atoms/cp_async.cuh"
#include "atoms/mma.cuh"
#include "atoms/mma_fp8.cuh"
#include "atoms/relu.cuh"
#include "mainloop/indexer_operand.cuh"
#include "mainloop/indexer_queries.cuh"

constexpr u32 WARPS = QG_THREADS / 32, WARP_KEYS = QG_KEYS / WARPS;
// Queries of a CTA, at most.
constexpr u32 MOST_QUERIES = 64;
constexpr u32 ROW_BYTES = CHUNKS * 16;
constexpr u32 MMA_HEADS = 8, UNROLLED_TILES = QG_VARIANT >= 80 ? 2 : 1;
static_assert(QG_HEADS % MMA_HEADS == 0 && QG_THREADS >= MOST_QUERIES && CHUNKS % 4 == 0, "tiles are whole");

struct alignas(16) Stage {
    u8 heads[QG_HEADS * ROW_BYTES];
    float weights[QG_HEADS];
    float scales[QG_HEADS];
};

struct SharedStorage {
    Stage stages[QG_STAGES];
    SeenQueries<MOST_QUERIES> queries;
};
static_assert(sizeof(SharedStorage) == QG_SHARED_BYTES, "the host computes another size");

// Fragment layouts of keys, heads and products.
#if QG_VARIANT >= 75
// Tiles of 16 keys; a lane has two rows
// of each, and every fourth chunk.
constexpr u32 KEY_TILES = WARP_KEYS / 16, LANE_ROWS = 2, LANE_CHUNKS = CHUNKS / 4;
constexpr u32 SUMS = KEY_TILES * 2;
QG_DEVICE u32 row_of_lane(u32 lane, u32 tile, u32 i) {
    return tile * 16 + i * 8 + lane / 4;
}
QG_DEVICE u32 chunk_of_lane(u32 lane, u32 i) {
    return i * 4 + lane % 4;
}
QG_DEVICE u32 head_of_lane(u32 lane) {
    return lane / 4;
}
// Puts the two rows that are read together into different banks.
QG_DEVICE u32 swizzled(u32 head, u32 chunk) {
    return CHUNKS >= 8 ? chunk ^ (head & 1u) << 2 : chunk;
}
#else
// Four products of eight keys; a lane has a whole row of one product.
constexpr u32 KEY_TILES = 1, LANE_ROWS = 1, LANE_CHUNKS = CHUNKS;
constexpr u32 SUMS = 2;
static_assert(WARP_KEYS == 32, "four products of eight keys");
QG_DEVICE u32 row_of_lane(u32 lane, u32, u32) {
    return lane % 16 / 4 * 8 + lane % 4 + lane / 16 * 4;
}
QG_DEVICE u32 chunk_of_lane(u32, u32 i) {
    return i;
}
QG_DEVICE u32 head_of_lane(u32 lane) {
    return lane % 4 + lane / 16 * 4;
}
QG_DEVICE u32 swizzled(u32 head, u32 chunk) {
    return chunk ^ (head & 7u);
}
#endif

// Key fragments of a lane.
struct Keys {
    u32 words[KEY_TILES][LANE_ROWS][LANE_CHUNKS][4];

    // Each lane holds the position of one key of the
    // warp. `there`: bits of the keys that exist.
    template <bool ALIGNED>
    QG_DEVICE void load(Keys& keys, const IndexerParams& p, const KeyAddress& place, u32 there, u32 lane) {
#pragma unroll
        for (u32 tile = 0; tile < KEY_TILES; tile++) {
#pragma unroll
            for (u32 i = 0; i < LANE_ROWS; i++) {
                const u32 row = row_of_lane(lane, tile, i);
                const u64 element = (u64)shfl_idx_u32((u32)(place.row >> 32), row) << 32 | shfl_idx_u32((u32)place.row, row);
                const u8* from = reinterpret_cast<const u8*>(p.k) + element * FEATURE_BYTES;
#pragma unroll
                for (u32 j = 0; j < LANE_CHUNKS; j++) {
                    const u32 chunk = chunk_of_lane(lane, j);
                    u32x4 v = {0, 0, 0, 0};
                    if ((there >> row & 1u) && chunk * CHUNK_FEATURES < p.features)
                        v = load_chunk<ALIGNED>(from + chunk * CHUNK_BYTES);
                    u32(&words)[4] = keys.words[tile][i][j];
                    words[0] = v.x, words[1] = v.y, words[2] = v.z, words[3] = v.w;
                }
            }
        }
    }
};

// Accumulators of a lane for eight heads.
constexpr u32 PRODUCTS = QG_VARIANT >= 75 ? 4 : 8;

// Adds the products of one chunk.
QG_DEVICE void multiply(float (&d)[KEY_TILES][PRODUCTS], const Keys& keys, u32 chunk, const u32 (&b)[4]) {
#pragma unroll
    for (u32 tile = 0; tile < KEY_TILES; tile++) {
        const u32(&low)[4] = keys.words[tile][0][chunk];
        const u32(&high)[4] = keys.words[tile][LANE_ROWS - 1][chunk];
#if QG_VARIANT >= 80
#pragma unroll
        for (u32 i = 0; i < 4; i += 2) {
            const u32 a[4] = {low[i], high[i], low[i + 1], high[i + 1]}, pair[2] = {b[i], b[i + 1]};
            if constexpr (QG_X == DTYPE_BF16)
                mma_m16n8k16_bf16(d[tile], a, pair);
#if QG_VARIANT >= 89
            else if constexpr (IS_E4M3 && !IS_DECODED)
                mma_m16n8k32_e4m3(d[tile], a, pair);
#endif
            else
                mma_m16n8k16_f16(d[tile], a, pair);
        }
#elif QG_VARIANT >= 75
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            const u32 a[2] = {low[i], high[i]};
            mma_m16n8k8_f16(d[tile], a, b[i]);
        }
#else
#pragma unroll
        for (u32 i = 0; i < 4; i += 2) {
            const u32 a[2] = {low[i], low[i + 1]}, pair[2] = {b[i], b[i + 1]};
            mma_m8n8k4_f16(d[tile], a, pair);
        }
#endif
    }
}

// Products of the lane's keys with eight heads in shared memory.
QG_DEVICE void multiply_heads(float (&d)[KEY_TILES][PRODUCTS], const Keys& keys, const u8* heads, u32 lane) {
    // FP8 MMAs accumulate with about 14 bits:
    // promote to f32 after 128 features.
    constexpr u32 PART = IS_E4M3 && !IS_DECODED && LANE_CHUNKS > 2 ? 2 : LANE_CHUNKS;
    const u32 head = head_of_lane(lane);
#pragma unroll
    for (u32 first = 0; first < LANE_CHUNKS; first += PART) {
        float part[KEY_TILES][PRODUCTS] = {};
#pragma unroll
        for (u32 i = first; i < first + PART; i++) {
            const u32 chunk = chunk_of_lane(lane, i);
            const u32x4 v = ld_shared(reinterpret_cast<const u32x4*>(heads + head * ROW_BYTES + swizzled(head, chunk) * 16));
            const u32 b[4] = {v.x, v.y, v.z, v.w};
            multiply(part, keys, i, b);
        }
#pragma unroll
        for (u32 tile = 0; tile < KEY_TILES; tile++) {
#pragma unroll
            for (u32 i = 0; i < PRODUCTS; i++) d[tile][i] = first == 0 ? part[tile][i] : d[tile][i] + part[tile][i];
        }
    }
}

// Adds weighted ReLU products of eight
// heads; only `heads` of them exist.
QG_DEVICE void add_weighed(float (&sums)[SUMS], const float (&d)[KEY_TILES][PRODUCTS], const float* weights,
                           const float* scales, bool has_scales, u32 heads, u32 lane) {
    constexpr u32 PAIRS = PRODUCTS / 4;
#pragma unroll
    for (u32 pair = 0; pair < PAIRS; pair++) {
        const u32 column = QG_VARIANT >= 75 ? lane % 4 * 2 : pair * 4 + (lane & 2u);
        f32x2 weight = ld_shared(reinterpret_cast<const f32x2*>(weights + column));
        if (has_scales) {
            const f32x2 scale = ld_shared(reinterpret_cast<const f32x2*>(scales + column));
            weight.x *= scale.x, weight.y *= scale.y;
        }
#pragma unroll
        for (u32 tile = 0; tile < KEY_TILES; tile++) {
#pragma unroll
            for (u32 row = 0; row < 2; row++) {
                const float first = d[tile][pair * 4 + row * 2], second = d[tile][pair * 4 + row * 2 + 1];
                float& sum = sums[tile * 2 + row];
                if (heads >= MMA_HEADS) {
                    sum = fma_f32(weight.y, relu(second), fma_f32(weight.x, relu(first), sum));
                } else {
                    // Absent heads may be NaN (0 · inf), so skip them.
                    if (column < heads) sum = fma_f32(weight.x, relu(first), sum);
                    if (column + 1 < heads) sum = fma_f32(weight.y, relu(second), sum);
                }
            }
        }
    }
}

// The key for which the lane stores a sum, and whether it stores one.
struct LaneKey {
    u32 row;
    bool is_own;

    QG_DEVICE LaneKey of(u32 lane) {
#if QG_VARIANT >= 75
        const u32 t = lane % 4;
        return {t / 2 * 16 + t % 2 * 8 + lane / 4, t < SUMS};
#else
        return {row_of_lane(lane, 0, 0), true};
#endif
    }
};

// Sum over all columns for the lane's key: lanes exchange halves.
QG_DEVICE float sum_of_lane(const float (&sums)[SUMS], u32 lane) {
#if QG_VARIANT >= 75
    float halves[KEY_TILES];
#pragma unroll
    for (u32 tile = 0; tile < KEY_TILES; tile++) {
        const float kept = lane & 1u ? sums[2 * tile + 1] : sums[2 * tile];
        const float given = lane & 1u ? sums[2 * tile] : sums[2 * tile + 1];
        halves[tile] = kept + shfl_xor(given, 1);
    }
    if constexpr (KEY_TILES == 1) return halves[0] + shfl_xor(halves[0], 2);
    const float kept = lane & 2u ? halves[KEY_TILES - 1] : halves[0], given = lane & 2u ? halves[0] : halves[KEY_TILES - 1];
    return kept + shfl_xor(given, 2);
#else
    const float kept = lane & 2u ? sums[1] : sums[0], given = lane & 2u ? sums[0] : sums[1];
    return kept + shfl_xor(given, 2);
#endif
}

// Whether cp.async copies chunks unconverted.
constexpr bool COPIES_ASYNC = QG_VARIANT >= 80 && !IS_DECODED;

// Copies `rows` rows of heads; rows from `heads` on become zeros.
template <bool ALIGNED>
QG_DEVICE void copy_rows(const IndexerParams& p, u8* to, const u8* q, u32 rows, u32 heads) {
    // Chunks of a thread in flight.
    constexpr u32 TOGETHER = COPIES_ASYNC && ALIGNED ? 1 : 4;
    for (u32 base = thread_index(); base < rows * CHUNKS; base += TOGETHER * QG_THREADS) {
        u32x4 chunks[TOGETHER];
#pragma unroll
        for (u32 i = 0; i < TOGETHER; i++) {
            const u32 at = base + i * QG_THREADS, row = at / CHUNKS, chunk = at % CHUNKS;
            const bool wanted = row < heads && chunk * CHUNK_FEATURES < p.features;
            const u8* from = q + (wanted ? row * p.q_head * FEATURE_BYTES + chunk * CHUNK_BYTES : 0);
#if QG_VARIANT >= 80
            if constexpr (COPIES_ASYNC && ALIGNED) {
                cp_async_16_or_zeros(wanted, shared_address(to + row * ROW_BYTES + swizzled(row, chunk) * 16), from);
                continue;
            }
#endif
            const u32x4 v = load_chunk<ALIGNED>(from);
            chunks[i] = wanted ? v : u32x4{0, 0, 0, 0};
        }
        if constexpr (COPIES_ASYNC && ALIGNED) continue;
#pragma unroll
        for (u32 i = 0; i < TOGETHER; i++) {
            const u32 at = base + i * QG_THREADS, row = at / CHUNKS, chunk = at % CHUNKS;
            if (at < rows * CHUNKS) st_shared(reinterpret_cast<u32x4*>(to + row * ROW_BYTES + swizzled(row, chunk) * 16), chunks[i]);
        }
    }
}

// Copies heads of a query to a stage,
// padded with zero heads to whole MMAs.
QG_DEVICE void copy_heads(const IndexerParams& p, Stage& stage, u64 query, u32 first) {
    const u32 heads = least(p.heads - first, QG_HEADS), rows = (heads + MMA_HEADS - 1) / MMA_HEADS * MMA_HEADS;
    const u8* q = reinterpret_cast<const u8*>(p.q) + (query * p.q_token + first * p.q_head) * FEATURE_BYTES;
    if (p.q_aligned)
        copy_rows<true>(p, stage.heads, q, rows, heads);
    else
        copy_rows<false>(p, stage.heads, q, rows, heads);
    for (u32 row = thread_index(); row < rows; row += QG_THREADS) {
        const u64 weight = query * p.weights_row + first + row, scale = query * p.heads + first + row;
        const bool wanted = row < heads;
#if QG_VARIANT >= 80
        const u32 bytes = wanted ? 4 : 0;
        cp_async_4(reinterpret_cast<u8*>(&stage.weights[row]), reinterpret_cast<const u8*>(p.weights) + (wanted ? weight * 4 : 0), bytes);
        if (p.q_scales)
            cp_async_4(reinterpret_cast<u8*>(&stage.scales[row]), reinterpret_cast<const u8*>(p.q_scales) + (wanted ? scale * 4 : 0), bytes);
#else
        st_shared(&stage.weights[row], wanted ? bits_to_f32(word_at(p.weights, weight)) : 0.0f);
        if (p.q_scales) st_shared(&stage.scales[row], wanted ? bits_to_f32(word_at(p.q_scales, scale)) : 0.0f);
#endif
    }
}

QG_DEVICE void commit_copies() {
#if QG_VARIANT >= 80
    cp_async_commit_group();
#endif
}

// Waits for all but the latest stages. The barrier
// also ensures that the stage to refill has been read.
QG_DEVICE void wait_for_copies() {
#if QG_VARIANT >= 80
    cp_async_wait_group<QG_STAGES - 2>();
#endif
    cta_barrier();
}

extern "C" __global__ void __launch_bounds__(QG_THREADS) qg_indexer_mma(const __grid_constant__ IndexerParams p) {
    SharedStorage& shared = *reinterpret_cast<SharedStorage*>(dynamic_shared());
    const u32 lane = thread_index() % 32, warp = thread_index() / 32;
    const u32 key = cta_index().x % p.key_ctas * QG_KEYS, query_cta = cta_index().x / p.key_ctas;
    const u32 sequence = query_cta / p.query_ctas, first_query = query_cta % p.query_ctas * p.cta_queries;
    const u32 count = least(p.cta_queries, p.sequence_queries - first_query);
    griddepcontrol_launch_dependents();
    griddepcontrol_wait();
    const u32 active = note_queries(p, shared.queries, sequence, first_query, count, key, QG_KEYS, QG_THREADS);
    if (active == 0) return;

    const u64 launch_query = (u64)sequence * p.sequence_queries + first_query;
    const u32 parts = (p.heads + QG_HEADS - 1) / QG_HEADS, items = active * parts;
    const auto copy_item = [&](u32 item) {
        const u32 query = ld_shared(&shared.queries.seeing[item / parts]);
        copy_heads(p, shared.stages[item % QG_STAGES], p.first_query + launch_query + query, item % parts * QG_HEADS);
    };
#pragma unroll
    for (u32 i = 0; i < QG_STAGES - 1; i++) {
        if (i < items) copy_item(i);
        commit_copies();
    }

    // Each lane looks up one key of the warp.
    const u32 warp_key = key + warp * WARP_KEYS, own_key = warp_key + lane % WARP_KEYS;
    KeyAddress place = {0, 0, false};
    if (own_key < p.most_keys) place = address_of_key(p, sequence_index(p, sequence), own_key);
    float scale = 1.0f;
    if (p.k_scales && place.is_there) scale = bits_to_f32(word_at(p.k_scales, place.scale));
    const u32 there = ballot(place.is_there);
    Keys keys;
    if (p.k_aligned)
        Keys::load<true>(keys, p, place, there, lane);
    else
        Keys::load<false>(keys, p, place, there, lane);
    const LaneKey lane_key = LaneKey::of(lane);
    const float lane_scale = bits_to_f32(shfl_idx_u32(f32_to_bits(scale), lane_key.row));
    const u32 score_key = warp_key + lane_key.row;
    const bool is_stored = lane_key.is_own && score_key < p.most_keys, is_there = there >> lane_key.row % 32 & 1u;

    float sums[SUMS] = {};
    for (u32 item = 0; item < items; item++) {
        wait_for_copies();
        if (item + QG_STAGES - 1 < items) copy_item(item + QG_STAGES - 1);
        commit_copies();
        const Stage& stage = shared.stages[item % QG_STAGES];
        const u32 part = item % parts, heads = least(p.heads - part * QG_HEADS, QG_HEADS);
        // Two independent products at a time, where registers suffice.
#pragma unroll UNROLLED_TILES
        for (u32 first = 0; first < heads; first += MMA_HEADS) {
            float d[KEY_TILES][PRODUCTS];
            multiply_heads(d, keys, stage.heads + first * ROW_BYTES, lane);
            add_weighed(sums, d, stage.weights + first, stage.scales + first, p.q_scales != 0, heads - first, lane);
        }
        if (part + 1 < parts) continue;
        const float score = sum_of_lane(sums, lane) * lane_scale;
        const u32 query = ld_shared(&shared.queries.seeing[item / parts]);
        if (is_stored) {
            const KeyRange visible = {ld_shared(&shared.queries.first[query]), ld_shared(&shared.queries.end[query])};
            const bool is_visible = is_there && score_key >= visible.first && score_key < visible.end;
            const u64 at = (launch_query + query) * p.scores_row + score_key;
            st_global_u32(reinterpret_cast<u8*>(p.scores) + at * 4, is_visible ? score_bits(score) : p.masked_score);
        }
#pragma unroll
        for (u32 i = 0; i < SUMS; i++) sums[i] = 0.0f;
    }
}
