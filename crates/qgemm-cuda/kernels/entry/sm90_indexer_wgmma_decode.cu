// Sparse-attention indexer scores for few queries on Hopper
// (FP8 WGMMA). All heads of a sequence's queries stay in shared
// memory as columns. Keys stream through registers as rows, one
// tile per warpgroup at a time, with the next tiles in flight.
#include "atoms/sync.cuh"
#include "atoms/tma.cuh"
#include "mainloop/indexer_keys.cuh"
#include "mainloop/sm90/indexer_wgmma.cuh"

constexpr u32 WARPS = QG_THREADS / 32, WARPGROUPS = WARPS / 4;
// Keys per warpgroup and per warp, and
// the key stride between iterations.
constexpr u32 TILE_KEYS = 64, WARP_KEYS = 16, KEY_STRIDE = WARPGROUPS * TILE_KEYS;
// Tiles of a warp in flight.
constexpr u32 IN_FLIGHT = 2;
// Queries over all columns.
constexpr u32 QUERIES = QG_GROUPS * COLUMN_QUERIES;
constexpr u32 ROW_CHUNKS = FEATURES / 16;

struct SharedStorage {
    // Groups must be 1024-byte aligned: the
    // 128-byte swizzle depends on the address.
    alignas(16) u8 heads[QG_GROUPS][COLUMNS * FEATURES];
    float weights[QG_GROUPS][COLUMNS];
    // Visible keys of each query; empty without a query.
    KeyRange visible[QUERIES];
};
static_assert(sizeof(SharedStorage) == QG_SHARED_BYTES, "the host computes another size");

// Byte offset of a word of a column. Lane t of four loads chunks
// t and t + 4 of a key, and each k-step takes four bytes of
// each. This permutes the features, so heads are permuted alike.
QG_DEVICE u32 word_place(u32 column, u32 chunk, u32 word) {
    const u32 step = chunk / 4 * 2 + word / 2, half = word % 2;
    return column * FEATURES + ((step * 2 + half) ^ (column % 8)) * 16 + chunk % 4 * 4;
}

// Loads the heads and weights of `count`
// queries; absent ones become zeros.
QG_DEVICE void load_heads(const IndexerParams& p, SharedStorage& shared, u64 query, u32 count) {
    for (u32 at = thread_index(); at < QG_GROUPS * COLUMNS * ROW_CHUNKS; at += QG_THREADS) {
        const u32 column = at / ROW_CHUNKS, chunk = at % ROW_CHUNKS, own = column / QG_HEADS, head = column % QG_HEADS;
        u32x4 v = {0, 0, 0, 0};
        if (own < count && head < p.heads && chunk * 16 < p.features)
            v = ld_global_v4(reinterpret_cast<const u8*>(p.q) + (query + own) * p.q_token + head * p.q_head + chunk * 16);
        const u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
        for (u32 i = 0; i < 4; i++)
            st_shared(reinterpret_cast<u32*>(shared.heads[column / COLUMNS] + word_place(column % COLUMNS, chunk, i)), words[i]);
    }
    for (u32 column = thread_index(); column < QG_GROUPS * COLUMNS; column += QG_THREADS) {
        const u32 own = column / QG_HEADS, head = column % QG_HEADS;
        float weight = 0.0f;
        if (own < count && head < p.heads) {
            weight = bits_to_f32(word_at(p.weights, (query + own) * p.weights_row + head));
            if (p.q_scales) weight *= bits_to_f32(word_at(p.q_scales, (query + own) * p.heads + head));
        }
        st_shared(&shared.weights[column / COLUMNS][column % COLUMNS], weight);
    }
    // WGMMA reads shared memory through the async proxy.
    fence_proxy_async();
    cta_barrier();
}

// Row of a page; an invalid page if no key exists.
struct PageRow {
    u32 page, row;
};

// Iterates over the two rows of a lane
// in its warp's tiles, with their pages.
struct RowWalk {
    // Key of the first row; the second is eight
    // further. Keys from `end` on do not exist.
    u32 key, end;
    // Index into the block table, and row within the page.
    u32 place[2], row[2];
    // Step per iteration.
    u32 step_places, step_rows;

    QG_DEVICE RowWalk from(const IndexerParams& p, u32 key, u32 end) {
        RowWalk walk;
        walk.key = key, walk.end = end;
        // Without pages, all keys are in page 0.
        walk.step_places = p.lengths ? KEY_STRIDE / p.page_size : 0;
        walk.step_rows = KEY_STRIDE - walk.step_places * p.page_size;
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
            walk.place[i] = p.lengths ? (key + i * 8) / p.page_size : 0;
            walk.row[i] = key + i * 8 - walk.place[i] * p.page_size;
        }
        return walk;
    }

    // Looks up the current rows and advances.
    QG_DEVICE void next(RowWalk& walk, const IndexerParams& p, u32 sequence, PageRow (&rows)[2]) {
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
            rows[i] = {~0u, walk.row[i]};
            if (walk.key + i * 8 < walk.end) rows[i].page = p.lengths ? word_at(p.block_table + (u64)sequence * p.table_width * 4, walk.place[i]) : 0;
            walk.place[i] += walk.step_places, walk.row[i] += walk.step_rows;
            if (p.lengths && walk.row[i] >= p.page_size) walk.row[i] -= p.page_size, walk.place[i]++;
        }
        walk.key += KEY_STRIDE;
    }
};

// Data of a lane's tiles in flight: chunks t and
// t + 4 of two rows, the scale of the key whose
// score it stores, and a bit for its presence.
struct Fetched {
    u32x4 chunks[IN_FLIGHT][2][2];
    float scales[IN_FLIGHT];
    u32 there;

    // Absent data leaves registers unchanged: absent
    // features stay zero, and absent keys get no score.
    QG_DEVICE void load(Fetched& fetched, u32 slot, const IndexerParams& p, const PageRow (&rows)[2], u32 lane) {
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
            const bool is_there = rows[i].page < p.pages;
            const u8* from = reinterpret_cast<const u8*>(p.k) + rows[i].page * p.k_page + rows[i].row * p.k_row + lane % 4 * 16;
#pragma unroll
            for (u32 half = 0; half < 2; half++)
                if (is_there && half * 64 + lane % 4 * 16 < p.features) fetched.chunks[slot][i][half] = ld_global_once_v4(from + half * 64);
        }
        const u32 page = lane % 2 ? rows[1].page : rows[0].page, row = lane % 2 ? rows[1].row : rows[0].row;
        const bool is_there = page < p.pages;
        fetched.there = (fetched.there & ~(1u << slot)) | (u32)is_there << slot;
        if (is_there) fetched.scales[slot] = bits_to_f32(word_at(p.k_scales, page * p.k_scale_page + row));
    }

    QG_DEVICE LaneKeys keys(const Fetched& fetched, u32 slot) {
        LaneKeys keys;
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
#pragma unroll
            for (u32 i = 0; i < 2; i++) {
                const u32x4& chunk = fetched.chunks[slot][i][half];
                keys.a[half * 2][i] = chunk.x, keys.a[half * 2][2 + i] = chunk.y;
                keys.a[half * 2 + 1][i] = chunk.z, keys.a[half * 2 + 1][2 + i] = chunk.w;
            }
        }
        return keys;
    }
};

extern "C" __global__ void __launch_bounds__(QG_THREADS, 2)
    qg_sm90_indexer_wgmma_decode(const __grid_constant__ IndexerParams p) {
    SharedStorage& shared = *reinterpret_cast<SharedStorage*>(dynamic_shared());
    // The shuffle makes the index warp-uniform for the compiler.
    const u32 thread = thread_index(), lane = thread % 32, warp = shfl_idx_u32(thread / 32, 0);
    const u32 launch_sequence = cta_index().x / p.key_ctas, count = p.sequence_queries;
    const u32 first_key = cta_index().x % p.key_ctas * p.cta_keys, last_key = least(first_key + p.cta_keys, p.most_keys);
    griddepcontrol_launch_dependents();
    griddepcontrol_wait();
    const u32 sequence = sequence_index(p, launch_sequence), warpgroup = warp / 4;
    const u64 launch_query = (u64)launch_sequence * count;
    const u32 own_row = warpgroup * TILE_KEYS + warp % 4 * WARP_KEYS + lane / 4;
    RowWalk walk;
    PageRow first[IN_FLIGHT][2], ahead[2];
    const auto look_up = [&](u32 from) {
        walk = RowWalk::from(p, from + own_row, last_key);
#pragma unroll
        for (u32 i = 0; i < IN_FLIGHT; i++) RowWalk::next(walk, p, sequence, first[i]);
    };
    // In paged caches visible keys begin at 0, so page
    // lookups can start before the ends are known.
    if (p.lengths) look_up(first_key);
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
    u8* const scores = reinterpret_cast<u8*>(p.scores) + launch_query * p.scores_row * 4;
    const u32 behind = from < end ? least(from + (end - from + TILE_KEYS - 1) / TILE_KEYS * TILE_KEYS, last_key) : from;
    for (u32 query = 0; query < count; query++) {
        for (u32 key = first_key + thread; key < last_key; key += QG_THREADS)
            if (key < from || key >= behind) st_global_u32(scores + (query * p.scores_row + key) * 4, p.masked_score);
    }
    if (from >= end) return;

    const u32 tiles = (behind - from + TILE_KEYS - 1) / TILE_KEYS;
    if (!p.lengths) look_up(from);
    walk.end = behind;
    Fetched fetched = {};
#pragma unroll
    for (u32 i = 0; i < IN_FLIGHT; i++) Fetched::load(fetched, i, p, first[i], lane);
    RowWalk::next(walk, p, sequence, ahead);
    load_heads(p, shared, p.first_query + launch_query, count);

    for (u32 base = warpgroup; base < tiles; base += IN_FLIGHT * WARPGROUPS) {
#pragma unroll
        for (u32 i = 0; i < IN_FLIGHT; i++) {
            if (base + i * WARPGROUPS >= tiles) break;
            LaneKeys keys = Fetched::keys(fetched, i);
            const float scale = fetched.scales[i] * row_factor(lane);
            const bool is_there = fetched.there >> i & 1u;
            const u32 key = walk.key - (IN_FLIGHT + 1) * KEY_STRIDE + lane % 2 * 8;
#pragma unroll
            for (u32 step = 0; step < STEPS; step++) wgmma_fence_operand(keys.a[step]);
            Fetched::load(fetched, i, p, ahead, lane);
            RowWalk::next(walk, p, sequence, ahead);
            // WGMMA is warp-collective; converge after the divergent loads.
            warp_barrier();
            // Stores scores of query `one` and `other`, which may be equal.
            const auto store = [&](float of_one, float of_other, u32 one, u32 other) {
                const float score = sum_of_lane(of_one, of_other, lane) * scale;
                const u32 query = one + lane / 2 % 2;
                if (query > other || query >= count || key >= behind) return;
                const KeyRange visible = ld_shared(&shared.visible[query]);
                const bool is_visible = is_there && key >= visible.first && key < visible.end;
                st_global_u32(scores + (query * p.scores_row + key) * 4, is_visible ? score_bits(score) : p.masked_score);
            };
            float before = 0.0f;
#pragma unroll
            for (u32 group = 0; group < QG_GROUPS; group++) {
                float d[ACCUMULATORS];
                wgmma_fence_accumulators(d);
                wgmma_fence();
                multiply(d, keys, wgmma_descriptor_128b(shared.heads[group]));
                wgmma_wait_group<0>();
                wgmma_fence_accumulators(d);
                const Sums sums = Sums::of(d, shared.weights[group], lane);
                const float of_first = sum_of_row(sums.value[0], lane);
                if constexpr (COLUMN_QUERIES == 2)
                    store(of_first, sum_of_row(sums.value[COLUMN_QUERIES - 1], lane), group * 2, group * 2 + 1);
                else if constexpr (QG_GROUPS == 1)
                    store(of_first, of_first, 0, 0);
                else if (group % 2 == 1)
                    store(before, of_first, group - 1, group);
                before = of_first;
            }
        }
    }
}
