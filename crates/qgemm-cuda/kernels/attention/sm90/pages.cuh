// Prefill on Hopper with a paged KV cache. If
// pages and tiles share pieces of eight or more
// rows, TMA copies piece by piece (QG_PAGES 1).
// Otherwise warps copy row by row with cp.async,
// in the layout that TMA would write (QG_PAGES 2).
#pragma once
#include "attention/sm90/ring.cuh"
#if QG_PAGES == 2
#include "atoms/cp_async.cuh"
#endif

// Whether some query attends to one of `count` keys from
// `key` on. The block table is not read for other keys.
QG_DEVICE bool any_visible(const AttentionItem& item, u32 key, u32 count) {
    return key < item.keys.end && key + count > item.keys.first;
}

#if QG_PAGES == 1
// TMA coordinates of a piece of a tile: page and
// first row within it. A piece that is masked or has
// no page gets page −1, so TMA fills it with zeros.
struct Piece {
    i32 page, row;
    bool is_absent;

    // Piece `i` of the tile that begins at key `tile`.
    QG_DEVICE Piece of(const TmaAttentionParams& params, const AttentionItem& item, u32 tile, u32 i) {
        const u32 keys = 1u << params.piece_shift, key = tile + i * keys;
        if (i * keys >= QG_KEYS || !any_visible(item, key, keys)) return {-1, 0, false};
        const KeyAddress at = address_of_key(params.attention, item.s, key);
        return {at.is_present ? (i32)at.page : -1, (i32)at.row, !at.is_present};
    }
};

// Copies rows of COLUMNS features from `first_column` on; each
// lane of the warp holds one piece. Warp-collective.
template <u32 COLUMNS>
QG_DEVICE void copy_pieces(u8* to, const HeadsMap& map, const TmaAttentionParams& params, u32 kv_head, const Piece& piece,
                           u32 first_column, u64* full, u32 lane) {
    if (lane == 0) mbarrier_arrive_expect_tx(full, QG_KEYS * COLUMNS * 2);
#pragma unroll 1
    for (u32 i = 0, row = 0; row < QG_KEYS; i++, row += 1u << params.piece_shift) {
        const i32 page = (i32)shfl_idx_u32((u32)piece.page, i), first = (i32)shfl_idx_u32((u32)piece.row, i);
        if (lane != 0) continue;
#pragma unroll
        for (u32 box = 0; box < COLUMNS / BOX; box++) {
            const i32 at[5] = {(i32)(first_column + box * BOX), first, (i32)kv_head, page, 0};
            cp_async_bulk_tensor_5d(to + box * KEYS_BOX_BYTES + row * BOX * 2, &map, at, full);
        }
    }
}

// TMA producer warp for paged K and
// V; order of copies as in `produce`.
QG_DEVICE void produce_pieces(AttentionRing& ring, const TmaAttentionParams& params, u32 lane) {
    RingPosition k = {}, v = {};
    u32 q_parity = 0;
    ItemWalk walk = {};
    AttentionItem item;
    while (ItemWalk::next(walk, params, item)) {
        if (item.tiles == 0) continue;
        mbarrier_wait(&ring.q_empty, q_parity ^ 1);
        q_parity ^= 1;
        if (lane == 0) copy_queries(ring, params, item);
        Piece piece = {};
#pragma unroll 1
        for (u32 i = 0; i <= item.tiles; i++) {
            const Piece before = piece;
            if (i < item.tiles) {
                piece = Piece::of(params, item, AttentionItem::tile(item, i).key, lane);
                const u32 absent = ballot(piece.is_absent);
                mbarrier_wait(&ring.k_empty[k.stage], k.parity ^ 1);
#pragma unroll
                for (u32 word = 0; word < QG_KEYS / 32; word++) {
                    const u32 of_word = ballot(absent >> ((word * 32 + lane) >> params.piece_shift) & 1u);
                    if (lane == 0) st_shared(&ring.absent[slot_of(k)][word], of_word);
                }
                copy_pieces<QG_QK>(ring.k[k.stage], params.k_map, params, item.kv_head, piece, 0, &ring.k_full[k.stage], lane);
                RingPosition::next(k);
            }
            if (i > 0) {
                mbarrier_wait(&ring.v_empty[v.stage], v.parity ^ 1);
                copy_pieces<QG_V>(ring.v[v.stage], params.v_map, params, item.kv_head, before, first_feature(),
                                  &ring.v_full[v.stage], lane);
                RingPosition::next(v);
            }
        }
    }
}

QG_DEVICE void produce_pages(AttentionRing& ring, const TmaAttentionParams& params, u32 warp, u32 lane) {
    if (warp > 0)
        inspect(ring, params, warp - 1, lane);
    else
        produce_pieces(ring, params, lane);
}
#else
constexpr u32 COPIED_ROWS = QG_KEYS / ROW_COPIERS, LANE_ROWS = COPIED_ROWS / 32;
static_assert(COPIED_ROWS % 32 == 0, "a lane looks rows up");

// K or V in the cache: strides in elements.
struct HeadRows {
    const u8* first;
    u64 page_stride, token_stride, head_stride;
    u32 columns;
};

// Rows of a tile that a warp copies. A
// lane holds the address of every 32nd
// row, or NONE if the row is not read.
struct TileRows {
    u64 element[LANE_ROWS];
    static constexpr u64 NONE = ~0ull;

    // Looks up the rows from key `first` on.
    // `absent`: bits of keys without a page.
    QG_DEVICE TileRows of(const AttentionParams& p, const HeadRows& heads, const AttentionItem& item, u32 first, u32 lane,
                          u32 (&absent)[LANE_ROWS]) {
        TileRows rows;
#pragma unroll
        for (u32 i = 0; i < LANE_ROWS; i++) {
            const u32 key = first + i * 32 + lane;
            bool is_absent = false;
            rows.element[i] = NONE;
            if (any_visible(item, key, 1)) {
                const KeyAddress at = address_of_key(p, item.s, key);
                is_absent = !at.is_present;
                if (at.is_present) rows.element[i] = at.page * heads.page_stride + at.row * heads.token_stride;
            }
            absent[i] = ballot(is_absent);
        }
        return rows;
    }

    // Copies rows of COLUMNS features to a stage,
    // from row `first` on, and waits for them. A
    // lane copies one 16-byte chunk of every
    // fourth row of a box. Warp-collective.
    template <u32 COLUMNS>
    QG_DEVICE void copy(const TileRows& rows, u8* stage, u32 first, const HeadRows& heads, u32 kv_head, u32 lane) {
        const u32 unit = lane % 8, to = shared_address(stage);
        const u8* from = heads.first + (kv_head * heads.head_stride + unit * 8) * 2;
#pragma unroll
        for (u32 i = 0; i < LANE_ROWS; i++) {
            const u32 low = (u32)rows.element[i], high = (u32)(rows.element[i] >> 32);
#pragma unroll 2
            for (u32 j = 0; j < 32; j += 4) {
                const u32 source = j + lane / 8, row = first + i * 32 + source;
                const u64 element = (u64)shfl_idx_u32(high, source) << 32 | shfl_idx_u32(low, source);
                const u32 place = to + row * BOX * 2 + (unit ^ (row & 7u)) * 16;
#pragma unroll
                for (u32 box = 0; box < COLUMNS / BOX; box++) {
                    const bool wanted = element != NONE && box * BOX + unit * 8 < heads.columns;
                    const u8* at = from + (wanted ? element + box * BOX : 0) * 2;
                    cp_async_16_or_zeros(wanted, place + box * KEYS_BOX_BYTES, at);
                }
            }
        }
        cp_async_commit_group();
        cp_async_wait_group<0>();
    }
};

// Producer warp of K: half of the rows of each tile.
QG_DEVICE void produce_keys(AttentionRing& ring, const TmaAttentionParams& params, u32 warp, u32 lane) {
    const AttentionParams& p = params.attention;
    const HeadRows heads = {reinterpret_cast<const u8*>(p.at.k), p.at.k_page, p.at.k_token, p.at.k_head, p.shape.qk_dim};
    const u32 first = warp * COPIED_ROWS;
    RingPosition k = {};
    u32 q_parity = 0;
    ItemWalk walk = {};
    AttentionItem item;
    while (ItemWalk::next(walk, params, item)) {
        if (item.tiles == 0) continue;
        if (warp == 0) {
            mbarrier_wait(&ring.q_empty, q_parity ^ 1);
            q_parity ^= 1;
            if (lane == 0) copy_queries(ring, params, item);
        }
#pragma unroll 1
        for (u32 i = 0; i < item.tiles; i++, RingPosition::next(k)) {
            u32 absent[LANE_ROWS];
            const TileRows rows = TileRows::of(p, heads, item, AttentionItem::tile(item, i).key + first, lane, absent);
            mbarrier_wait(&ring.k_empty[k.stage], k.parity ^ 1);
#pragma unroll
            for (u32 word = 0; word < LANE_ROWS; word++) {
                if (lane == 0) st_shared(&ring.absent[slot_of(k)][warp * LANE_ROWS + word], absent[word]);
            }
            TileRows::copy<QG_QK>(rows, ring.k[k.stage], first, heads, item.kv_head, lane);
            // WGMMA reads shared memory through the async proxy.
            fence_proxy_async();
            AttentionRing::release(&ring.k_full[k.stage], lane);
        }
    }
}

// Producer warp of V: half of the rows
// of each tile. It also checks its rows
// of mixed tiles for infinities and NaN.
QG_DEVICE void produce_values(AttentionRing& ring, const TmaAttentionParams& params, u32 warp, u32 lane) {
    const AttentionParams& p = params.attention;
    const u8* values = reinterpret_cast<const u8*>(p.at.v) + first_feature() * 2;
    const HeadRows heads = {values, p.at.v_page, p.at.v_token, p.at.v_head, features_of_cta(p)};
    const u32 first = warp * COPIED_ROWS;
    RingPosition v = {};
    ItemWalk walk = {};
    AttentionItem item;
    while (ItemWalk::next(walk, params, item)) {
#pragma unroll 1
        for (u32 i = 0; i < item.tiles; i++, RingPosition::next(v)) {
            const KeysTile tile = AttentionItem::tile(item, i);
            u32 absent[LANE_ROWS];
            const TileRows rows = TileRows::of(p, heads, item, tile.key + first, lane, absent);
            mbarrier_wait(&ring.v_empty[v.stage], v.parity ^ 1);
            TileRows::copy<QG_V>(rows, ring.v[v.stage], first, heads, item.kv_head, lane);
            u32 found = 0;
            if (tile.is_mixed) {
#pragma unroll 1
                for (u32 j = lane; j < COPIED_ROWS * QG_V / 8; j += 32) {
                    // The 16-byte chunk that the same lane copied.
                    const u32 box = j / (COPIED_ROWS * 8), row = first + j / 8 % COPIED_ROWS;
                    const u8* of_row = ring.v[v.stage] + box * KEYS_BOX_BYTES + row * BOX * 2;
                    const u32x4 word = ld_shared(reinterpret_cast<const u32x4*>(of_row + (j % 8 ^ row % 8) * 16));
                    found |= not_finite_pair(word.x) | not_finite_pair(word.y) | not_finite_pair(word.z) |
                             not_finite_pair(word.w);
                }
            }
            const u32 any = ballot(found != 0);
            if (lane == 0) st_shared(&ring.not_finite[v.stage][warp], any);
            // WGMMA reads shared memory through the async proxy.
            fence_proxy_async();
            AttentionRing::release(&ring.v_checked[v.stage], lane);
        }
    }
}

QG_DEVICE void produce_pages(AttentionRing& ring, const TmaAttentionParams& params, u32 warp, u32 lane) {
    if (warp < ROW_COPIERS)
        produce_keys(ring, params, warp, lane);
    else
        produce_values(ring, params, warp - ROW_COPIERS, lane);
}
#endif
