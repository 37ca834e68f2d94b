// Tile lists of masked attention, built before the
// attention kernel: the K tiles in which a row of the
// mask has bits. One CTA per list, one warp per tile.
#include "atoms/bits.cuh"
#include "attention/mask_tile_list.cuh"

// Tiles that are classified before they are listed.
constexpr u32 WARPS = QG_THREADS / 32, TILES_AT_ONCE = 1024, LANE_QUERIES = QG_ROWS / 32;

// Mask class of a tile.
enum TileMask : u8 { EMPTY, FULL, MIXED };

struct SharedStorage {
    u8 visible[TILES_AT_ONCE];
};
static_assert(sizeof(SharedStorage) == QG_SHARED_BYTES, "the host computes another size");

// Queries of a list.
struct ListedRows {
    Sequence s;
    u32 head, first_query, last_query;
};

// Classifies the tile that begins at key
// `tile`: one query per lane. Warp-collective.
QG_DEVICE TileMask classify_tile(const ListedParams& p, const ListedRows& rows, u32 tile, u32 lane) {
    TileVisibility visibility = TileVisibility::none();
#pragma unroll
    for (u32 i = 0; i < LANE_QUERIES; i++) {
        // Queries beyond the last repeat the last query.
        const u32 query = least(rows.first_query + i * 32 + lane, rows.last_query);
        const KeyRange visible = visible_keys(p, rows.s, query);
        TileVisibility::add<QG_KEYS / WORD_KEYS>(visibility, p, mask_row(p, rows.s, rows.head, query), visible, tile);
    }
    if (ballot(visibility.any != 0) == 0) return EMPTY;
    return ballot(visibility.all != ~0u) == 0 ? FULL : MIXED;
}

extern "C" __global__ void __launch_bounds__(QG_THREADS)
    qg_attention_list_tiles(const __grid_constant__ ListedParams p) {
    SharedStorage& shared = *reinterpret_cast<SharedStorage*>(dynamic_shared());
    const u32 lane = thread_index() % 32, warp = shfl_idx_u32(thread_index() / 32, 0);
    griddepcontrol_launch_dependents();
    griddepcontrol_wait();
    const u32 row_tile = cta_index().x % p.at.row_ctas, of_head = cta_index().x / p.at.row_ctas;
    ListedRows rows;
    rows.s = sequence_of(p, of_head % p.shape.sequences);
    rows.head = of_head / p.shape.sequences;
    rows.first_query = row_tile * QG_ROWS;
    if (rows.first_query >= rows.s.queries) return;
    rows.last_query = least(rows.first_query + QG_ROWS, rows.s.queries) - 1;
    const KeyRange keys = visible_keys_of(p, rows.s, rows.first_query, rows.last_query);
    const u32 first_tile = keys.first / QG_KEYS;
    // End of the tiles that are not yet listed.
    u32 end_tile = keys.first < keys.end ? (keys.end + QG_KEYS - 1) / QG_KEYS : first_tile;
    u8* list = tile_list(p, rows.s, rows.head, row_tile);
    u32 listed = 0;
#pragma unroll 1
    while (end_tile > first_tile) {
        const u32 count = least(end_tile - first_tile, TILES_AT_ONCE);
#pragma unroll 1
        for (u32 i = warp; i < count; i += WARPS) {
            const TileMask visible = classify_tile(p, rows, (end_tile - 1 - i) * QG_KEYS, lane);
            if (lane == 0) st_shared(&shared.visible[i], (u8)visible);
        }
        cta_barrier();
        // Warp 0 writes the list. Other warps only
        // count, so that all agree on `listed`.
#pragma unroll 1
        for (u32 i = 0; i < count; i += 32) {
            const u32 visible = i + lane < count ? ld_shared(&shared.visible[i + lane]) : (u8)EMPTY;
            const u32 nonempty = ballot(visible != EMPTY);
            const u32 place = listed + popc(nonempty & ((1u << lane) - 1));
            const u32 entry = (end_tile - 1 - i - lane) * QG_KEYS + (visible == MIXED ? MIXED_TILE : 0);
            if (warp == 0 && visible != EMPTY) st_global_u32(list + (1 + (u64)place) * 4, entry);
            listed += popc(nonempty);
        }
        cta_barrier();
        end_tile -= count;
    }
    if (thread_index() == 0) st_global_u32(list, listed);
}
