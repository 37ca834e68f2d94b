// Prefill on Hopper: the work of a CTA, and how its queries, keys and values come to shared memory. Tiles are stored as TMA writes
// them in the 128-byte swizzle, boxes of 64 features: 128 bytes of each row.
#pragma once
#include "atoms/mbarrier.cuh"
#include "atoms/tma_batch.cuh"
#include "atoms/tma_tensor5.cuh"
#include "mainloop/attention_tile_list.cuh"

constexpr u32 BOX = 64, WARPGROUPS = QG_WARPGROUPS, ROWS = WARPGROUPS * 64;
constexpr u32 CONSUMERS = WARPGROUPS * 128;
static_assert(QG_THREADS == CONSUMERS + 128, "a warpgroup of producers");
static_assert(QG_QK % BOX == 0 && QG_V % BOX == 0, "a row of a box is the swizzle's 128 bytes");
constexpr u32 Q_BOX_BYTES = 64 * BOX * 2, KEYS_BOX_BYTES = QG_KEYS * BOX * 2;
constexpr u32 Q_BYTES = ROWS * QG_QK * 2, K_BYTES = QG_KEYS * QG_QK * 2, V_BYTES = QG_KEYS * QG_V * 2;
// Keys and values that lie in pages come by TMA in pieces of a page (QG_PAGES 1), or row by row by `cp.async` (2).
#if defined(QG_PAGES) && QG_PAGES == 2
constexpr bool BY_ROWS = true;
#else
constexpr bool BY_ROWS = false;
#endif
// Warps that look at values before consumers multiply them. Of the four warps that copy rows, two have keys, and two values.
constexpr u32 INSPECTORS = BY_ROWS ? 2 : 3, ROW_COPIERS = 2;

// Heads of tokens as TMA sees them.
struct alignas(64) HeadsMap {
    u64 word[16];
};

struct TmaAttentionParams {
#ifdef QG_BITS
    ListedParams attention;
#else
    AttentionParams attention;
#endif
    // Heads whose keys stay in L2 while CTAs go through their queries.
    u32 heads_together;
    // Of pages: keys of a piece, 2 to this power.
    u32 piece_shift;
    // Q: [heads][tokens][features]; K and V: [pages][heads][rows][features].
    HeadsMap q_map, k_map, v_map;
};

// A tile of keys: the first, and whether some queries see keys of it and others do not, or nobody.
struct KeysTile {
    u32 key;
    bool is_mixed;
};

// Up to ROWS queries of a head, and their keys in tiles: the last ones first, among which those are that some queries see and others do
// not.
struct AttentionItem {
    Sequence s;
    u32 head, kv_head, first_query, last_query;
    // What all queries see together, and what each of them sees.
    KeyRange keys, of_all;
    u32 first_tile, tiles;
#ifdef QG_BITS
    // The tiles that a mask leaves.
    const u8* list;
#endif

    QG_DEVICE KeysTile tile(const AttentionItem& item, u32 i) {
#ifdef QG_BITS
        const u32 entry = ld_global_u32(item.list + (1 + (u64)i) * 4);
        return {entry & ~MIXED_TILE, (entry & MIXED_TILE) != 0};
#else
        const u32 key = item.first_tile + (item.tiles - 1 - i) * QG_KEYS;
        return {key, key < item.of_all.first || key + QG_KEYS > item.of_all.end};
#endif
    }
};

// The items of a CTA, group of heads by group. Of each group the longest come first, and CTAs take them in turn, forwards and then
// backwards, so that all get long ones and short ones.
struct ItemWalk {
    u32 first_head, round;
    bool is_backwards;

    // The next item that has queries, if there is one.
    QG_DEVICE bool next(ItemWalk& walk, const TmaAttentionParams& params, AttentionItem& item) {
        const AttentionParams& p = params.attention;
        const u32 ctas = grid_ctas().x;
        while (walk.first_head < p.shape.heads) {
            const u32 heads = least(params.heads_together, p.shape.heads - walk.first_head);
            const u32 turn = walk.is_backwards ? ctas - 1 - cta_index().x : cta_index().x;
            const u32 number = walk.round * ctas + turn;
            walk.is_backwards = !walk.is_backwards;
            walk.round++;
            if (number >= heads * p.shape.sequences * p.at.row_ctas) {
                walk.first_head += heads;
                walk.round = 0;
                continue;
            }
            item.head = walk.first_head + number % heads;
            if (of(params, number / heads, item)) return true;
        }
        return false;
    }

    // Item `number` of a head.
    QG_DEVICE bool of(const TmaAttentionParams& params, u32 number, AttentionItem& item) {
        const AttentionParams& p = params.attention;
        item.s = sequence_of(p, number % p.shape.sequences);
        // The last queries of a causal sequence see the most keys: those begin first.
        const u32 row_tile = p.at.row_ctas - 1 - number / p.shape.sequences;
        item.first_query = row_tile * ROWS;
        if (item.first_query >= item.s.queries) return false;
        item.last_query = least(item.first_query + ROWS, item.s.queries) - 1;
        item.kv_head = item.head / (p.shape.heads / p.shape.kv_heads);
        item.keys = keys_seen_by(p, item.s, item.first_query, item.last_query);
        item.of_all = {keys_seen(p, item.s, item.last_query).first, keys_seen(p, item.s, item.first_query).end};
        item.first_tile = item.keys.first / QG_KEYS * QG_KEYS;
#ifdef QG_BITS
        item.list = tile_list(params.attention, item.s, item.head, row_tile);
        item.tiles = ld_global_u32(item.list);
#else
        item.tiles = item.keys.first < item.keys.end ? (item.keys.end - item.first_tile + QG_KEYS - 1) / QG_KEYS : 0;
#endif
        return true;
    }
};

struct AttentionRing {
    alignas(1024) u8 q[Q_BYTES];
    alignas(1024) u8 k[QG_STAGES][K_BYTES];
    alignas(1024) u8 v[QG_STAGES][V_BYTES];
    u64 q_full, q_empty;
    u64 k_full[QG_STAGES], k_empty[QG_STAGES];
    // Values have arrived; they have been looked at; they are read.
    u64 v_full[QG_STAGES], v_seen[QG_STAGES], v_empty[QG_STAGES];
    // What each inspector found in values of mixed tiles: whether some are infinite or NaN.
    u32 not_finite[QG_STAGES][4];
#ifdef QG_PAGES
    // Which keys of a tile have no page, a bit each. Consumers ask when they have released the keys: those of two turns of the ring.
    u32 absent[2 * QG_STAGES][QG_KEYS / 32];
#endif

    // For the first thread, before a CTA barrier.
    QG_DEVICE void init(AttentionRing& ring) {
        mbarrier_init(&ring.q_full, 1);
        mbarrier_init(&ring.q_empty, CONSUMERS / 32);
#pragma unroll
        for (u32 i = 0; i < QG_STAGES; i++) {
            mbarrier_init(&ring.k_full[i], BY_ROWS ? ROW_COPIERS : 1);
            mbarrier_init(&ring.k_empty[i], CONSUMERS / 32);
            mbarrier_init(&ring.v_full[i], 1);
            mbarrier_init(&ring.v_seen[i], INSPECTORS);
            mbarrier_init(&ring.v_empty[i], CONSUMERS / 32);
        }
        fence_mbarrier_init();
    }
    // For a warp whose instructions on what the barrier guards are complete.
    QG_DEVICE void release(u64* empty, u32 lane) {
        warp_barrier();
        if (lane == 0) mbarrier_arrive(empty);
    }
};
static_assert(sizeof(AttentionRing) == QG_SHARED_BYTES, "the host computes another size");

// A position in the ring; the parity says how often it has wrapped, modulo 2.
struct RingPosition {
    u32 stage, parity;

    QG_DEVICE void next(RingPosition& at) {
        if (++at.stage == QG_STAGES) at.stage = 0, at.parity ^= 1;
    }
};

#ifdef QG_PAGES
// Which of `absent` are those of a tile whose keys are at `k`.
QG_DEVICE u32 slot_of(const RingPosition& k) {
    return k.parity * QG_STAGES + k.stage;
}
#endif

// Copies QG_KEYS rows of COLUMNS features from `tile` on. What lies outside of the operand arrives as zeros.
template <u32 COLUMNS>
QG_DEVICE void copy_rows(u8* to, const HeadsMap& map, const AttentionParams& p, const AttentionItem& item, u32 tile,
                         u64* full) {
    mbarrier_arrive_expect_tx(full, QG_KEYS * COLUMNS * 2);
    const u32 page = p.shape.flags & QG_FLAG_KV_OFFSETS ? 0 : item.s.index;
#pragma unroll
    for (u32 i = 0; i < COLUMNS / BOX; i++) {
        const i32 at[5] = {(i32)(i * BOX), (i32)(item.s.row + tile), (i32)item.kv_head, (i32)page, 0};
        cp_async_bulk_tensor_5d(to + i * KEYS_BOX_BYTES, &map, at, full);
    }
}

QG_DEVICE void copy_queries(AttentionRing& ring, const TmaAttentionParams& params, const AttentionItem& item) {
    mbarrier_arrive_expect_tx(&ring.q_full, Q_BYTES);
#pragma unroll
    for (u32 i = 0; i < Q_BYTES / Q_BOX_BYTES; i++) {
        const u32 rows = i / (QG_QK / BOX) * 64, column = i % (QG_QK / BOX) * BOX;
        cp_async_bulk_tensor_3d(ring.q + i * Q_BOX_BYTES, &params.q_map, (i32)column,
                                (i32)(item.s.token + item.first_query + rows), (i32)item.head, &ring.q_full);
    }
}

// The work of the producer: the keys of each tile, and behind them the values of the tile before, as consumers take them.
QG_DEVICE void produce(AttentionRing& ring, const TmaAttentionParams& params) {
    const AttentionParams& p = params.attention;
    // For what has never been filled, the phase before the first counts as complete.
    RingPosition k = {}, v = {};
    u32 q_parity = 0;
    ItemWalk walk = {};
    AttentionItem item;
    while (ItemWalk::next(walk, params, item)) {
        if (item.tiles == 0) continue;
        mbarrier_wait(&ring.q_empty, q_parity ^ 1);
        q_parity ^= 1;
        copy_queries(ring, params, item);
#pragma unroll 1
        for (u32 i = 0; i <= item.tiles; i++) {
            if (i < item.tiles) {
                mbarrier_wait(&ring.k_empty[k.stage], k.parity ^ 1);
                copy_rows<QG_QK>(ring.k[k.stage], params.k_map, p, item, AttentionItem::tile(item, i).key,
                                 &ring.k_full[k.stage]);
                RingPosition::next(k);
            }
            if (i > 0) {
                mbarrier_wait(&ring.v_empty[v.stage], v.parity ^ 1);
                copy_rows<QG_V>(ring.v[v.stage], params.v_map, p, item, AttentionItem::tile(item, i - 1).key,
                                &ring.v_full[v.stage]);
                RingPosition::next(v);
            }
        }
    }
}

// Whether one of two neighbouring numbers is infinite or NaN: adding one to the highest exponent reaches the sign.
QG_DEVICE u32 not_finite_pair(u32 pair) {
    constexpr u32 ONE = QG_KV == DTYPE_BF16 ? 0x0080u : 0x0400u;
    return ((pair & 0x7fff7fffu) + (ONE | ONE << 16)) & 0x80008000u;
}

// The work of an inspector: it puts zeros in the place of values behind the last key, which may hold anything, and notes whether values
// of mixed tiles are infinite or NaN: a weight of zero would not keep them away from queries that do not see them.
QG_DEVICE void inspect(AttentionRing& ring, const TmaAttentionParams& params, u32 inspector, u32 lane) {
    RingPosition v = {};
    ItemWalk walk = {};
    AttentionItem item;
    while (ItemWalk::next(walk, params, item)) {
#pragma unroll 1
        for (u32 i = 0; i < item.tiles; i++, RingPosition::next(v)) {
            const KeysTile tile = AttentionItem::tile(item, i);
            mbarrier_wait(&ring.v_full[v.stage], v.parity);
            if (tile.is_mixed) {
                const u32 there = beyond(item.s.keys, tile.key);
                u32 found = 0;
#pragma unroll 1
                for (u32 unit = inspector * 32 + lane; unit < V_BYTES / 16; unit += INSPECTORS * 32) {
                    u32x4* at = reinterpret_cast<u32x4*>(ring.v[v.stage] + unit * 16);
                    if (unit / 8 % QG_KEYS < there) {
                        const u32x4 word = ld_shared(at);
                        found |= not_finite_pair(word.x) | not_finite_pair(word.y) | not_finite_pair(word.z) |
                                 not_finite_pair(word.w);
                    } else {
                        st_shared(at, {0, 0, 0, 0});
                    }
                }
                // Matrix instructions read the zeros next.
                fence_proxy_async();
                const u32 any = ballot(found != 0);
                if (lane == 0) st_shared(&ring.not_finite[v.stage][inspector], any);
            }
#ifdef QG_PAGES
            // Consumers take a tile for mixed, too, of which a key has no page.
            else if (lane == 0) {
                st_shared(&ring.not_finite[v.stage][inspector], 0u);
            }
#endif
            AttentionRing::release(&ring.v_seen[v.stage], lane);
        }
    }
}
