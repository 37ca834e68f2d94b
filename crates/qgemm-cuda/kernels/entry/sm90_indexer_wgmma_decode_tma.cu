// Warp-specialized indexer scores for few queries on
// Hopper (FP8 WGMMA), if each K tile lies in one page.
// All heads of a sequence's queries stay in shared memory
// as columns; a producer warp copies K tiles by TMA.
#include "atoms/cp_async.cuh"
#include "atoms/mbarrier.cuh"
#include "atoms/sync.cuh"
#include "atoms/tma_stream.cuh"
#include "mainloop/indexer_keys.cuh"
#include "mainloop/sm90/indexer_wgmma.cuh"
#include "mainloop/sm90/indexer_wgmma_shared.cuh"

// Tensor maps must be 64-byte aligned.
struct alignas(64) KeysMap {
    u64 word[16];
};

struct TmaIndexerParams {
    IndexerParams indexer;
    // Keys: [page][row][feature], boxes of TILE_KEYS rows and
    // 128 features, 128-byte swizzle, zeros out of bounds.
    KeysMap k_map;
};

constexpr u32 CONSUMERS = QG_THREADS - 32, WARPGROUPS = CONSUMERS / 128;
// Keys per tile. Warpgroups take tiles in turn.
constexpr u32 TILE_KEYS = 64, TILE_BYTES = TILE_KEYS * FEATURES;
// Queries over all columns.
constexpr u32 QUERIES = QG_GROUPS * COLUMN_QUERIES;
constexpr u32 ROW_CHUNKS = FEATURES / 16;
// Consumer iteration: two products, of one tile or of two.
constexpr u32 TURN = QG_GROUPS == 1 ? 2 : QG_GROUPS, TURN_TILES = TURN / QG_GROUPS;

// Scales of a K tile.
struct alignas(16) TileScales {
    float scale[TILE_KEYS];
    // Whether the block table has a valid page.
    u32 is_there;
};

struct SharedStorage {
    // Tiles and groups must be 1024-byte aligned:
    // the 128-byte swizzle depends on the address.
    alignas(16) u8 keys[WARPGROUPS][QG_STAGES][TILE_BYTES];
    u8 heads[QG_GROUPS][COLUMNS * FEATURES];
    TileScales scales[WARPGROUPS][QG_STAGES];
    float weights[QG_GROUPS][COLUMNS];
    // Visible keys of each query; empty without a query.
    KeyRange visible[QUERIES];
    u64 full[WARPGROUPS][QG_STAGES], empty[WARPGROUPS][QG_STAGES];
};
static_assert(sizeof(SharedStorage) == QG_SHARED_BYTES, "the host computes another size");
// Each warpgroup has a ring for its tiles.
// - `full` completes a phase after 33 arrivals: one of the
// producer lane that announces the bytes of keys, 32 of the
// lanes whose scales have arrived. TMA's bytes must also have
// arrived; boxes always count in full, even out of bounds.
// - `empty` completes a phase when the four
// warps of the warpgroup have arrived. The
// phase before the first counts as complete.
// No role passes a CTA barrier after the setup,
// so the producer may exit early. Consumers
// wait for all copies that it started.
constexpr u32 FILLING = 1 + 32, EMPTYING = 4;

// Heads and weights that a consumer copies to shared memory;
// absent ones are zeros. These loads are issued before the
// key copies: issued later, they would also return later.
struct OwnHeads {
    static constexpr u32 CHUNKS = QG_GROUPS * COLUMNS * ROW_CHUNKS / CONSUMERS;
    static constexpr u32 WEIGHTS = (QG_GROUPS * COLUMNS + CONSUMERS - 1) / CONSUMERS;
    u32x4 chunks[CHUNKS];
    float weights[WEIGHTS];

    // Loads `count` queries from `query` on.
    QG_DEVICE OwnHeads load(const IndexerParams& p, u64 query, u32 count) {
        OwnHeads heads;
#pragma unroll
        for (u32 i = 0; i < CHUNKS; i++) {
            const u32 at = i * CONSUMERS + thread_index(), column = at / ROW_CHUNKS, chunk = at % ROW_CHUNKS;
            const u32 own = column / QG_HEADS, head = column % QG_HEADS;
            heads.chunks[i] = {0, 0, 0, 0};
            if (own < count && head < p.heads && chunk * 16 < p.features)
                heads.chunks[i] = ld_global_v4(reinterpret_cast<const u8*>(p.q) + (query + own) * p.q_token + head * p.q_head + chunk * 16);
        }
#pragma unroll
        for (u32 i = 0; i < WEIGHTS; i++) {
            const u32 column = i * CONSUMERS + thread_index(), own = column / QG_HEADS, head = column % QG_HEADS;
            heads.weights[i] = 0.0f;
            if (own < count && head < p.heads) {
                heads.weights[i] = bits_to_f32(word_at(p.weights, (query + own) * p.weights_row + head));
                if (p.q_scales) heads.weights[i] *= bits_to_f32(word_at(p.q_scales, (query + own) * p.heads + head));
            }
        }
        return heads;
    }

    __device__ __forceinline__ void store(SharedStorage& shared) const {
#pragma unroll
        for (u32 i = 0; i < CHUNKS; i++) {
            const u32 at = i * CONSUMERS + thread_index(), column = at / ROW_CHUNKS, chunk = at % ROW_CHUNKS;
            u8* to = shared.heads[column / COLUMNS] + column % COLUMNS * FEATURES + (chunk ^ (column % 8)) * 16;
            st_shared(reinterpret_cast<u32x4*>(to), chunks[i]);
        }
#pragma unroll
        for (u32 i = 0; i < WEIGHTS; i++) {
            const u32 column = i * CONSUMERS + thread_index();
            if (column < QG_GROUPS * COLUMNS) st_shared(&shared.weights[column / COLUMNS][column % COLUMNS], weights[i]);
        }
        // WGMMA reads shared memory through the async proxy.
        fence_proxy_async();
    }
};

// Row of a page; an invalid page if no key exists.
struct PageRow {
    u32 page, row;

    // Position of the tile at `key`; invalid
    // from `end` on. A tile is in one page.
    QG_DEVICE PageRow of(const IndexerParams& p, u32 sequence, u32 key, u32 end) {
        if (key >= end) return {~0u, 0};
        if (!p.lengths) return {0, key};
        const u32 place = key / p.page_size;
        return {word_at(p.block_table, (u64)sequence * p.table_width + place), key - place * p.page_size};
    }
};

// Producer warp: copies `tiles` tiles from
// key `from` on. Each lane holds the position
// of one of 32 tiles, at first in `first`.
QG_DEVICE void produce(SharedStorage& shared, const TmaIndexerParams& params, PageRow first, u32 sequence, u32 from, u32 end, u32 tiles,
                       u32 lane) {
    const IndexerParams& p = params.indexer;
    // Evict keys first: scores written meanwhile
    // are read soon and must stay in L2.
    const u64 policy = l2_evict_first();
    PageRow own = first;
    for (u32 tile = 0; tile < tiles; tile++) {
        if (tile > 0 && tile % 32 == 0) own = PageRow::of(p, sequence, from + (tile + lane) * TILE_KEYS, end);
        const u32 page = shfl_idx_u32(own.page, tile % 32), row = shfl_idx_u32(own.row, tile % 32);
        const u32 ring = tile % WARPGROUPS, turn = tile / WARPGROUPS, stage = turn % QG_STAGES, parity = turn / QG_STAGES % 2;
        mbarrier_wait(&shared.empty[ring][stage], parity ^ 1);
        u64* const full = &shared.full[ring][stage];
        TileScales& scales = shared.scales[ring][stage];
        const bool is_there = page < p.pages;
        if (lane == 0) {
            st_shared(&scales.is_there, (u32)is_there);
            mbarrier_arrive_expect_tx(full, TILE_BYTES);
            // A tile without a page copies page 0; its scores are masked.
            cp_async_bulk_tensor_3d_stream(shared.keys[ring][stage], &params.k_map, 0, (i32)row, is_there ? (i32)page : 0, full, policy);
        }
#pragma unroll
        for (u32 i = 0; i < TILE_KEYS; i += 32) {
            const u32 key = tile * TILE_KEYS + i + lane;
            const bool wanted = is_there && from + key < end;
            const u64 place = wanted ? page * p.k_scale_page + row + i + lane : 0;
            cp_async_4(reinterpret_cast<u8*>(&scales.scale[i + lane]), reinterpret_cast<const u8*>(p.k_scales) + place * 4, wanted ? 4 : 0);
        }
        cp_async_mbarrier_arrive(full);
        warp_barrier();
    }
}

// Consumer parameters: first key and end of the CTA,
// its tiles, number of queries, and their scores.
struct Task {
    u32 from, end, tiles, count;
    u8* scores;
};

QG_DEVICE void consume(SharedStorage& shared, const IndexerParams& p, const Task& task, u32 ring, u32 warp, u32 lane) {
    if (ring >= task.tiles) return;
    const u32 tiles = (task.tiles - ring + WARPGROUPS - 1) / WARPGROUPS;
    const u32 row = warp % 4 * 16 + lane / 4 + lane % 2 * 8;
    u32 stage = 0, parity = 0;
    float d[2][ACCUMULATORS];
    mbarrier_wait(&shared.full[ring][stage], parity);
    wgmma_fence_accumulators(d[0]);
    wgmma_fence();
    multiply_shared(d[0], wgmma_descriptor_128b(shared.keys[ring][stage]), wgmma_descriptor_128b(shared.heads[0]));
    for (u32 first = 0; first < tiles; first += TURN_TILES) {
        float before = 0.0f;
#pragma unroll
        for (u32 i = 0; i < TURN; i++) {
            const u32 tile = first + i / QG_GROUPS, group = i % QG_GROUPS;
            const bool is_last = group + 1 == QG_GROUPS;
            // After the last tile, multiply it
            // once more; the result is unused.
            u32 next_stage = stage, next_parity = parity;
            if (is_last && tile + 1 < tiles) {
                if (++next_stage == QG_STAGES) next_stage = 0, next_parity ^= 1;
            }
            if (is_last) mbarrier_wait(&shared.full[ring][next_stage], next_parity);
            float(&own)[ACCUMULATORS] = d[i % 2];
            float(&other)[ACCUMULATORS] = d[(i + 1) % 2];
            wgmma_wait_group<0>();
            wgmma_fence_accumulators(own);
            wgmma_fence_accumulators(other);
            wgmma_fence();
            multiply_shared(other, wgmma_descriptor_128b(shared.keys[ring][next_stage]), wgmma_descriptor_128b(shared.heads[is_last ? 0 : group + 1]));
            const Sums sums = Sums::of(own, shared.weights[group], lane);
            const float of_first = sum_of_row(sums.value[0], lane);
            // Stores scores of query `one` and `two`, which may be equal.
            const auto store = [&](float of_one, float of_two, u32 one, u32 two) {
                const TileScales& scales = shared.scales[ring][stage];
                const float score = sum_of_lane(of_one, of_two, lane) * (ld_shared(&scales.scale[row]) * row_factor(lane));
                const u32 query = one + lane / 2 % 2, key = task.from + (tile * WARPGROUPS + ring) * TILE_KEYS + row;
                const KeyRange visible = ld_shared(&shared.visible[query > two ? two : query]);
                const bool is_visible = ld_shared(&scales.is_there) && key >= visible.first && key < visible.end;
                const u32 bits = is_visible ? score_bits(score) : p.masked_score;
                if (query <= two && query < task.count && key < task.end) st_global_u32(task.scores + (query * p.scores_row + key) * 4, bits);
            };
            if constexpr (COLUMN_QUERIES == 2)
                store(of_first, sum_of_row(sums.value[COLUMN_QUERIES - 1], lane), group * 2, group * 2 + 1);
            else if constexpr (QG_GROUPS == 1)
                store(of_first, of_first, 0, 0);
            else if (group % 2 == 1)
                store(before, of_first, group - 1, group);
            before = of_first;
            if (is_last) {
                warp_barrier();
                if (lane == 0 && tile < tiles) mbarrier_arrive(&shared.empty[ring][stage]);
                stage = next_stage, parity = next_parity;
            }
        }
    }
    wgmma_wait_group<0>();
    wgmma_fence_accumulators(d[0]);
}

extern "C" __global__ void __launch_bounds__(QG_THREADS, 2)
    qg_sm90_indexer_wgmma_decode_tma(const __grid_constant__ TmaIndexerParams params) {
    SharedStorage& shared = *reinterpret_cast<SharedStorage*>(dynamic_shared());
    const IndexerParams& p = params.indexer;
    // The shuffle makes the index warp-uniform for the compiler.
    const u32 thread = thread_index(), lane = thread % 32, warp = shfl_idx_u32(thread / 32, 0);
    const u32 launch_sequence = cta_index().x / p.key_ctas, count = p.sequence_queries;
    const u32 first_key = cta_index().x % p.key_ctas * p.cta_keys, last_key = least(first_key + p.cta_keys, p.most_keys);
    if (thread == 0) {
#pragma unroll
        for (u32 i = 0; i < WARPGROUPS * QG_STAGES; i++) {
            mbarrier_init(&shared.full[i / QG_STAGES][i % QG_STAGES], FILLING);
            mbarrier_init(&shared.empty[i / QG_STAGES][i % QG_STAGES], EMPTYING);
        }
        fence_mbarrier_init();
    }
    griddepcontrol_launch_dependents();
    // Publishes the initialized mbarriers.
    cta_barrier();
    griddepcontrol_wait();
    const u32 sequence = sequence_index(p, launch_sequence);
    const u64 launch_query = (u64)launch_sequence * count;
    const bool is_producer = warp == CONSUMERS / 32;
    OwnHeads heads = {};
    if (!is_producer) heads = OwnHeads::load(p, p.first_query + launch_query, count);
    // In paged caches visible keys begin at 0, so page
    // lookups can start before the ends are known.
    PageRow first = {~0u, 0};
    if (is_producer && p.lengths) first = PageRow::of(p, sequence, first_key + lane * TILE_KEYS, last_key);
    // Union of the keys visible to the queries.
    u32 from = last_key, end = first_key;
#pragma unroll
    for (u32 i = 0; i < QUERIES; i++) {
        KeyRange visible = {0, 0};
        if (i < count) visible = visible_range(p, launch_sequence, i);
        if (thread == i) st_shared(&shared.visible[i], visible);
        if (visible.first >= visible.end) continue;
        from = least(from, visible.first);
        if (visible.end > end) end = visible.end;
    }
    end = least(end, last_key);
    // Round down to a whole tile of the CTA.
    from = from > first_key ? from - (from - first_key) % TILE_KEYS : first_key;
    const u32 tiles = from < end ? (end - from + TILE_KEYS - 1) / TILE_KEYS : 0;
    const u32 behind = tiles > 0 ? least(from + tiles * TILE_KEYS, last_key) : from;
    if (is_producer) {
        if (!p.lengths) first = PageRow::of(p, sequence, from + lane * TILE_KEYS, behind);
        produce(shared, params, first, sequence, from, behind, tiles, lane);
        return;
    }
    u8* const scores = reinterpret_cast<u8*>(p.scores) + launch_query * p.scores_row * 4;
    for (u32 query = 0; query < count; query++) {
        for (u32 key = first_key + thread; key < last_key; key += CONSUMERS)
            if (key < from || key >= behind) st_global_u32(scores + (query * p.scores_row + key) * 4, p.masked_score);
    }
    if (tiles == 0) return;
    heads.store(shared);
    barrier_sync(1, CONSUMERS);
    consume(shared, p, {from, behind, tiles, count, scores}, warp / 4, warp, lane);
}
