// Scores of E4M3 keys for a few queries of several heads on Hopper. All heads of a sequence's queries stay in shared memory, as columns of
// `wgmma`; each warp has a ring of its own, through which its share of the keys passes on the way to its registers, as rows.
#include "atoms/cp_async.cuh"
#include "atoms/relu.cuh"
#include "atoms/sync.cuh"
#include "atoms/tma.cuh"
#include "atoms/warp.cuh"
#include "mainloop/indexer_keys.cuh"
#include "mainloop/sm90/indexer_wgmma.cuh"

constexpr u32 WARPS = QG_THREADS / 32, WARPGROUPS = WARPS / 4;
// Keys of a warpgroup and of a warp at a time.
constexpr u32 TILE_KEYS = 64, WARP_KEYS = 16;
// Queries of all columns.
constexpr u32 QUERIES = QG_GROUPS * COLUMN_QUERIES;
constexpr u32 ROW_CHUNKS = FEATURES / 16;

struct alignas(16) WarpStage {
    u8 keys[WARP_KEYS * FEATURES];
    float scales[WARP_KEYS];
    // Which of them are there: a bit each.
    u32 there;
};

struct SharedStorage {
    // The 128-byte swizzle depends on the address: groups begin at multiples of 1024 bytes.
    alignas(16) u8 heads[QG_GROUPS][COLUMNS * FEATURES];
    WarpStage ring[WARPS][QG_STAGES];
    float weights[QG_GROUPS][COLUMNS];
};
static_assert(sizeof(SharedStorage) == QG_SHARED_BYTES, "the host computes another size");

// Copies the heads of `count` queries from `query` on and what they are weighed with: zeros in the place of those that are not there.
QG_DEVICE void load_heads(const IndexerParams& p, SharedStorage& shared, u64 query, u32 count) {
    for (u32 at = thread_index(); at < QG_GROUPS * COLUMNS * ROW_CHUNKS; at += QG_THREADS) {
        const u32 column = at / ROW_CHUNKS, chunk = at % ROW_CHUNKS, own = column / QG_HEADS, head = column % QG_HEADS;
        u32x4 v = {0, 0, 0, 0};
        if (own < count && head < p.heads && chunk * 16 < p.features)
            v = ld_global_v4(reinterpret_cast<const u8*>(p.q) + (query + own) * p.q_token + head * p.q_head + chunk * 16);
        u8* to = shared.heads[column / COLUMNS] + column % COLUMNS * FEATURES + (chunk ^ (column % 8)) * 16;
        st_shared(reinterpret_cast<u32x4*>(to), v);
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
    // The tensor cores read what was just stored.
    fence_proxy_async();
    cta_barrier();
}

// Copies a warp's keys from `key` on, in the background; none from `end` on.
QG_DEVICE void copy_keys(const IndexerParams& p, WarpStage& stage, u32 sequence, u32 key, u32 end, u32 lane) {
    const u32 own = key + lane % WARP_KEYS;
    KeyPlace place = {0, 0, false};
    if (own < end) place = place_of_key(p, sequence, own);
    const u32 there = ballot(place.is_there);
    const u32 chunk = lane % ROW_CHUNKS;
#pragma unroll
    for (u32 i = 0; i < WARP_KEYS; i += 32 / ROW_CHUNKS) {
        const u32 row = i + lane / ROW_CHUNKS;
        const u64 element = (u64)shfl_idx_u32((u32)(place.row >> 32), row) << 32 | shfl_idx_u32((u32)place.row, row);
        const bool wanted = (there >> row & 1u) && chunk * 16 < p.features;
        cp_async_16_or_zeros(wanted, shared_address(stage.keys + row * FEATURES + (chunk ^ (row % 8)) * 16),
                             reinterpret_cast<const u8*>(p.k) + (wanted ? element + chunk * 16 : 0));
    }
    if (lane < WARP_KEYS) {
        const u8* from = reinterpret_cast<const u8*>(p.k_scales) + (place.is_there ? place.scale * 4 : 0);
        cp_async_4(reinterpret_cast<u8*>(&stage.scales[lane]), from, place.is_there ? 4 : 0);
    }
    if (lane == 0) st_shared(&stage.there, there);
}

// A lane's rows of a warp's keys.
QG_DEVICE void load_rows(LaneKeys& keys, const WarpStage& stage, u32 lane) {
#pragma unroll
    for (u32 step = 0; step < STEPS; step++) {
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            const u32 row = lane / 4 + i % 2 * 8, chunk = step * 2 + i / 2;
            keys.a[step][i] = ld_shared(reinterpret_cast<const u32*>(stage.keys + row * FEATURES + (chunk ^ (row % 8)) * 16 + lane % 4 * 4));
        }
    }
}

extern "C" __global__ void __launch_bounds__(QG_THREADS, 1)
    qg_sm90_indexer_wgmma_decode(const __grid_constant__ IndexerParams p) {
    SharedStorage& shared = *reinterpret_cast<SharedStorage*>(dynamic_shared());
    // The shuffle tells the compiler that the place is the same for the whole warp.
    const u32 thread = thread_index(), lane = thread % 32, warp = shfl_idx_u32(thread / 32, 0);
    const u32 launch_sequence = cta_index().x / p.key_ctas, count = p.sequence_queries;
    const u32 first_key = cta_index().x % p.key_ctas * p.cta_keys, last_key = least(first_key + p.cta_keys, p.most_keys);
    griddepcontrol_launch_dependents();
    griddepcontrol_wait();
    const u32 sequence = sequence_index(p, launch_sequence);
    const u64 launch_query = (u64)launch_sequence * count;
    KeyRange seen[QUERIES];
    // What any query sees.
    u32 from = last_key, end = first_key;
#pragma unroll
    for (u32 i = 0; i < QUERIES; i++) {
        seen[i] = {0, 0};
        if (i >= count) continue;
        seen[i] = keys_seen(p, launch_sequence, i);
        if (seen[i].first >= seen[i].end) continue;
        from = least(from, seen[i].first);
        if (seen[i].end > end) end = seen[i].end;
    }
    end = least(end, last_key);
    // In whole tiles from the CTA's first key on.
    from = from > first_key ? from - (from - first_key) % TILE_KEYS : first_key;
    u8* const scores = reinterpret_cast<u8*>(p.scores) + launch_query * p.scores_row * 4;
    const u32 behind = from < end ? least(from + (end - from + TILE_KEYS - 1) / TILE_KEYS * TILE_KEYS, last_key) : from;
    for (u32 query = 0; query < count; query++) {
        for (u32 key = first_key + thread; key < last_key; key += QG_THREADS)
            if (key < from || key >= behind) st_global_u32(scores + (query * p.scores_row + key) * 4, p.not_seen);
    }
    if (from >= end) return;

    WarpStage* const ring = shared.ring[warp];
    const u32 tiles = (behind - from + TILE_KEYS - 1) / TILE_KEYS, warpgroup = warp / 4;
    const auto key_of = [&](u32 tile) { return from + tile * TILE_KEYS + warp % 4 * WARP_KEYS; };
    u32 copied = warpgroup, to = 0;
#pragma unroll
    for (u32 i = 0; i < QG_STAGES - 1; i++) {
        if (copied < tiles) copy_keys(p, ring[to], sequence, key_of(copied), behind, lane);
        cp_async_commit_group();
        copied += WARPGROUPS, to++;
    }
    load_heads(p, shared, p.first_query + launch_query, count);

    u32 at = 0;
    for (u32 tile = warpgroup; tile < tiles; tile += WARPGROUPS) {
        cp_async_wait_group<QG_STAGES - 2>();
        // All lanes' copies have landed, and the stage before this one has been read.
        warp_barrier();
        if (copied < tiles) copy_keys(p, ring[to], sequence, key_of(copied), behind, lane);
        cp_async_commit_group();
        copied += WARPGROUPS;
        if (++to == QG_STAGES) to = 0;
        const WarpStage& stage = ring[at];
        if (++at == QG_STAGES) at = 0;

        LaneKeys keys;
        load_rows(keys, stage, lane);
        const u32 row = lane / 4 + lane % 2 * 8, key = key_of(tile) + row;
        const float scale = ld_shared(&stage.scales[row]);
        const bool is_there = ld_shared(&stage.there) >> row & 1u;
#pragma unroll
        for (u32 step = 0; step < STEPS; step++) wgmma_fence_operand(keys.a[step]);
        Sums sums[QG_GROUPS];
#pragma unroll
        for (u32 group = 0; group < QG_GROUPS; group++) {
            float d[ACCUMULATORS];
            wgmma_fence_accumulators(d);
            wgmma_fence();
            multiply(d, keys, wgmma_descriptor_128b(shared.heads[group]));
            wgmma_wait_group<0>();
            wgmma_fence_accumulators(d);
            sums[group] = Sums::of(d, shared.weights[group], lane);
        }
#pragma unroll
        for (u32 first = 0; first < QUERIES; first += 2) {
            const u32 second = first + 1 < QUERIES ? first + 1 : first;
            const float score = sum_of_lane(sums[first / COLUMN_QUERIES].value[first % COLUMN_QUERIES],
                                            sums[second / COLUMN_QUERIES].value[second % COLUMN_QUERIES], lane) * scale;
            const u32 query = first + lane / 2 % 2;
            const KeyRange of = lane & 2u ? seen[second] : seen[first];
            if (query >= count || query >= QUERIES || key >= behind) continue;
            const bool is_seen = is_there && key >= of.first && key < of.end;
            st_global_u32(scores + (query * p.scores_row + key) * 4, is_seen ? score_bits(score) : p.not_seen);
        }
    }
    cp_async_wait_group<0>();
}
