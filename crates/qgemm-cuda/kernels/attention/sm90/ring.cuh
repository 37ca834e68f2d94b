// Prefill on Hopper: work items of a CTA and its TMA
// ring of Q, K and V. Tiles are in the 128-byte swizzle
// of TMA: boxes of 64 features, 128 bytes a row.
#pragma once
#include "atoms/mbarrier.cuh"
#include "atoms/tma_batch.cuh"
#include "atoms/tma_tensor5.cuh"
#include "attention/mask_tile_list.cuh"
#include "attention/value_slice.cuh"

constexpr u32 BOX = 64, WARPGROUPS = QG_WARPGROUPS, ROWS = WARPGROUPS * 64;
constexpr u32 CONSUMERS = WARPGROUPS * 128;
static_assert(QG_THREADS == CONSUMERS + 128, "a warpgroup of producers");
static_assert(QG_QK % BOX == 0 && QG_V % BOX == 0, "a row of a box is the swizzle's 128 bytes");
constexpr u32 Q_BOX_BYTES = 64 * BOX * 2, KEYS_BOX_BYTES = QG_KEYS * BOX * 2;
constexpr u32 Q_BYTES = ROWS * QG_QK * 2, K_BYTES = QG_KEYS * QG_QK * 2, V_BYTES = QG_KEYS * QG_V * 2;
// Paged K and V: TMA copies pieces of pages (QG_PAGES
// 1), or `cp.async` copies rows (QG_PAGES 2).
#if QG_PAGES == 2
constexpr bool BY_ROWS = true;
#else
constexpr bool BY_ROWS = false;
#endif
// Inspector warps check V before consumers multiply it.
// With row copies, two of four warps copy K and two copy V.
constexpr u32 INSPECTORS = BY_ROWS ? 2 : 3, ROW_COPIERS = 2;

// Tensor map of heads.
struct alignas(64) HeadsMap {
    u64 word[16];
};

struct TmaAttentionParams {
#if QG_BITS
    ListedParams attention;
#else
    AttentionParams attention;
#endif
    // Heads that CTAs process together,
    // so that their K and V stay in L2.
    u32 heads_together;
    // Paged: log2 of the keys of a piece.
    u32 piece_shift;
    // Q: [heads][tokens][features]; K and
    // V: [pages][heads][rows][features].
    HeadsMap q_map, k_map, v_map;
};

// K tile: first key, and whether it needs a mask because
// some query does not attend to all of its keys.
struct KeysTile {
    u32 key;
    bool is_mixed;
};

// Work item: up to ROWS queries of a head. K
// tiles are processed from last to first, so
// that tiles on the causal diagonal come first.
struct AttentionItem {
    Sequence s;
    u32 head, kv_head, first_query, last_query;
    // Union and intersection of the keys visible to the queries.
    KeyRange keys, visible_to_all;
    u32 first_tile, tiles;
#if QG_BITS
    // Tiles that the mask does not hide.
    const u8* list;
#endif

    QG_DEVICE KeysTile tile(const AttentionItem& item, u32 i) {
#if QG_BITS
        const u32 entry = ld_global_u32(item.list + (1 + (u64)i) * 4);
        return {entry & ~MIXED_TILE, (entry & MIXED_TILE) != 0};
#else
        const u32 key = item.first_tile + (item.tiles - 1 - i) * QG_KEYS;
        return {key, key < item.visible_to_all.first || key + QG_KEYS > item.visible_to_all.end};
#endif
    }
};

// Work items of a CTA, one group of heads after another. Each
// group starts with its longest items. CTAs take items in
// alternating direction, which balances long and short ones.
// Some CTAs have one round less in a group than others. So the
// direction follows from group and round, the same for all CTAs.
struct ItemWalk {
    u32 first_head, group, round;

    // Advances to the next item that
    // has queries; false at the end.
    QG_DEVICE bool next(ItemWalk& walk, const TmaAttentionParams& params, AttentionItem& item) {
        const AttentionParams& p = params.attention;
        const u32 ctas = grid_ctas().x;
        while (walk.first_head < p.shape.heads) {
            const u32 heads = least(params.heads_together, p.shape.heads - walk.first_head);
            const u32 turn = (walk.group + walk.round) % 2 ? ctas - 1 - cta_index().x : cta_index().x;
            const u32 number = walk.round * ctas + turn;
            walk.round++;
            if (number >= heads * p.shape.sequences * p.at.row_ctas) {
                walk.first_head += heads;
                walk.group++;
                walk.round = 0;
                continue;
            }
            item.head = walk.first_head + number % heads;
            if (of(params, number / heads, item)) return true;
        }
        return false;
    }

    // Item `number` of a head; false if it has no queries.
    QG_DEVICE bool of(const TmaAttentionParams& params, u32 number, AttentionItem& item) {
        const AttentionParams& p = params.attention;
        item.s = sequence_of(p, number % p.shape.sequences);
        // The last queries of a causal sequence
        // attend to the most keys: they begin first.
        const u32 row_tile = p.at.row_ctas - 1 - number / p.shape.sequences;
        item.first_query = row_tile * ROWS;
        if (item.first_query >= item.s.queries) return false;
        item.last_query = least(item.first_query + ROWS, item.s.queries) - 1;
        item.kv_head = item.head / (p.shape.heads / p.shape.kv_heads);
        item.keys = visible_keys_of(p, item.s, item.first_query, item.last_query);
        item.visible_to_all = {visible_keys(p, item.s, item.last_query).first, visible_keys(p, item.s, item.first_query).end};
        item.first_tile = item.keys.first / QG_KEYS * QG_KEYS;
#if QG_BITS
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
    // V has arrived; V has been inspected; V has been consumed.
    u64 v_full[QG_STAGES], v_checked[QG_STAGES], v_empty[QG_STAGES];
    // Per inspector: whether V of a
    // mixed tile has infinities or NaN.
    u32 not_finite[QG_STAGES][4];
#if QG_PAGES
    // Bits of keys without a page. Two turns of the ring:
    // consumers read the bits after they have released the keys.
    u32 absent[2 * QG_STAGES][QG_KEYS / 32];
#endif

    // Call from one thread, before a CTA barrier.
    QG_DEVICE void init(AttentionRing& ring) {
        mbarrier_init(&ring.q_full, 1);
        mbarrier_init(&ring.q_empty, CONSUMERS / 32);
#pragma unroll
        for (u32 i = 0; i < QG_STAGES; i++) {
            mbarrier_init(&ring.k_full[i], BY_ROWS ? ROW_COPIERS : 1);
            mbarrier_init(&ring.k_empty[i], CONSUMERS / 32);
            mbarrier_init(&ring.v_full[i], 1);
            mbarrier_init(&ring.v_checked[i], INSPECTORS);
            mbarrier_init(&ring.v_empty[i], CONSUMERS / 32);
        }
        fence_mbarrier_init();
    }
    // Arrives for a warp after its accesses are complete.
    QG_DEVICE void release(u64* empty, u32 lane) {
        warp_barrier();
        if (lane == 0) mbarrier_arrive(empty);
    }
};
static_assert(sizeof(AttentionRing) == QG_SHARED_BYTES, "the host computes another size");

// Position in the ring; `parity` flips at each wrap.
struct RingPosition {
    u32 stage, parity;

    QG_DEVICE void next(RingPosition& at) {
        if (++at.stage == QG_STAGES) at.stage = 0, at.parity ^= 1;
    }
};

#if QG_PAGES
// Slot of `absent` for the tile at ring position `k`.
QG_DEVICE u32 slot_of(const RingPosition& k) {
    return k.parity * QG_STAGES + k.stage;
}
#endif

// Copies QG_KEYS rows of COLUMNS features, `first` and
// further ones, from `tile` on. Out-of-bounds rows become zeros.
template <u32 COLUMNS>
QG_DEVICE void copy_rows(u8* to, const HeadsMap& map, const AttentionParams& p, const AttentionItem& item, u32 tile,
                         u32 first, u64* full) {
    mbarrier_arrive_expect_tx(full, QG_KEYS * COLUMNS * 2);
    const u32 page = p.shape.flags & QG_FLAG_KV_OFFSETS ? 0 : item.s.index;
#pragma unroll
    for (u32 i = 0; i < COLUMNS / BOX; i++) {
        const i32 at[5] = {(i32)(first + i * BOX), (i32)(item.s.row + tile), (i32)item.kv_head, (i32)page, 0};
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

// Producer: K of each tile, then V of the tile
// before, in the order in which consumers read them.
QG_DEVICE void produce(AttentionRing& ring, const TmaAttentionParams& params) {
    const AttentionParams& p = params.attention;
    // Empty stages: the phase before the first counts as complete.
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
                copy_rows<QG_QK>(ring.k[k.stage], params.k_map, p, item, AttentionItem::tile(item, i).key, 0,
                                 &ring.k_full[k.stage]);
                RingPosition::next(k);
            }
            if (i > 0) {
                mbarrier_wait(&ring.v_empty[v.stage], v.parity ^ 1);
                copy_rows<QG_V>(ring.v[v.stage], params.v_map, p, item, AttentionItem::tile(item, i - 1).key, first_feature(),
                                &ring.v_full[v.stage]);
                RingPosition::next(v);
            }
        }
    }
}

// Whether one of two 16-bit numbers is infinite or NaN: adding
// one to a saturated exponent carries into the sign bit.
QG_DEVICE u32 not_finite_pair(u32 pair) {
    constexpr u32 ONE = QG_KV == DTYPE_BF16 ? 0x0080u : 0x0400u;
    return ((pair & 0x7fff7fffu) + (ONE | ONE << 16)) & 0x80008000u;
}

// Inspector warp. It zeroes V rows beyond the
// last key, which may hold anything. It also
// checks V of mixed tiles for infinities and NaN:
// a probability of zero would not mask them.
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
                const u32 present = beyond(item.s.keys, tile.key);
                u32 found = 0;
#pragma unroll 1
                for (u32 unit = inspector * 32 + lane; unit < V_BYTES / 16; unit += INSPECTORS * 32) {
                    u32x4* at = reinterpret_cast<u32x4*>(ring.v[v.stage] + unit * 16);
                    if (unit / 8 % QG_KEYS < present) {
                        const u32x4 word = ld_shared(at);
                        found |= not_finite_pair(word.x) | not_finite_pair(word.y) | not_finite_pair(word.z) |
                                 not_finite_pair(word.w);
                    } else {
                        st_shared(at, {0, 0, 0, 0});
                    }
                }
                // WGMMA reads shared memory through the async proxy.
                fence_proxy_async();
                const u32 any = ballot(found != 0);
                if (lane == 0) st_shared(&ring.not_finite[v.stage][inspector], any);
            }
#if QG_PAGES
            // Consumers also treat a tile as mixed if a
            // key has no page, so this word must be valid.
            else if (lane == 0) {
                st_shared(&ring.not_finite[v.stage][inspector], 0u);
            }
#endif
            AttentionRing::release(&ring.v_checked[v.stage], lane);
        }
    }
}
