// Lists the tiles of keys of which a row of a mask has bits, before the kernel that attends to them: a CTA a list, a warp a tile.
#include "atoms/bits.cuh"
#include "mainloop/attention_tile_list.cuh"

// Tiles that are looked at before they are listed.
constexpr u32 WARPS = QG_THREADS / 32, TILES_AT_ONCE = 1024, LANE_QUERIES = QG_ROWS / 32;

// What is to be done with a tile.
enum Seen : u8 { NOTHING, EVERYTHING, SOMETHING };

struct SharedStorage {
    u8 seen[TILES_AT_ONCE];
};
static_assert(sizeof(SharedStorage) == QG_SHARED_BYTES, "the host computes another size");

// The queries of a list.
struct ListedRows {
    Sequence s;
    u32 head, first_query, last_query;
};

// What a warp's lanes together see of the tile from key `tile` on, a query a lane.
QG_DEVICE Seen look_at(const ListedParams& p, const ListedRows& rows, u32 tile, u32 lane) {
    Sight sight = Sight::none();
#pragma unroll
    for (u32 i = 0; i < LANE_QUERIES; i++) {
        // A query that is not there sees what the last one does.
        const u32 query = least(rows.first_query + i * 32 + lane, rows.last_query);
        const KeyRange seen = keys_seen(p, rows.s, query);
        Sight::add<QG_KEYS / WORD_KEYS>(sight, p, mask_row(p, rows.s, rows.head, query), seen, tile);
    }
    if (ballot(sight.any != 0) == 0) return NOTHING;
    return ballot(sight.all != ~0u) == 0 ? EVERYTHING : SOMETHING;
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
    const KeyRange keys = keys_seen_by(p, rows.s, rows.first_query, rows.last_query);
    const u32 first_tile = keys.first / QG_KEYS;
    // One behind the last that is not listed yet.
    u32 end_tile = keys.first < keys.end ? (keys.end + QG_KEYS - 1) / QG_KEYS : first_tile;
    u8* list = tile_list(p, rows.s, rows.head, row_tile);
    u32 listed = 0;
#pragma unroll 1
    while (end_tile > first_tile) {
        const u32 count = least(end_tile - first_tile, TILES_AT_ONCE);
#pragma unroll 1
        for (u32 i = warp; i < count; i += WARPS) {
            const Seen seen = look_at(p, rows, (end_tile - 1 - i) * QG_KEYS, lane);
            if (lane == 0) st_shared(&shared.seen[i], (u8)seen);
        }
        cta_barrier();
        // The first warp lists them; the others, which count along, come to the next ones when it is done.
#pragma unroll 1
        for (u32 i = 0; i < count; i += 32) {
            const u32 seen = i + lane < count ? ld_shared(&shared.seen[i + lane]) : (u8)NOTHING;
            const u32 kept = ballot(seen != NOTHING);
            const u32 place = listed + popc(kept & ((1u << lane) - 1));
            const u32 entry = (end_tile - 1 - i - lane) * QG_KEYS + (seen == SOMETHING ? MIXED_TILE : 0);
            if (warp == 0 && seen != NOTHING) st_global_u32(list + (1 + (u64)place) * 4, entry);
            listed += popc(kept);
        }
        cta_barrier();
        end_tile -= count;
    }
    if (thread_index() == 0) st_global_u32(list, listed);
}
