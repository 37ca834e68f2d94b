// Hopper MoE GEMM for few rows per expert, memory-bound.
// A persistent grid splits the row tiles of all active experts
// evenly. Each warp multiplies row tiles along all of K and
// copies its W in long bulk pieces.
// X of a tile of rows is resident in shared memory.
// The rest of shared memory holds W in flight.
#include "atoms/launch.cuh"
#include "epilogue/row_tile_store.cuh"
#include "mainloop/w_bulk_ring.cuh"
#include "mainloop/x_sum_table.cuh"
#include "mainloop/x_tile_copies.cuh"
#include "sched/early_experts.cuh"

static_assert(QG_ROW_TILES == 1 && QG_CLUSTER == 1, "a warp has a row tile at a time");

// Maximum of resident X tiles; a CTA's range seldom spans
// more tiles of rows.
constexpr u32 MOST_X_TILES = 4;
// Minimum piece size with several X tiles.
constexpr u32 LEAST_PIECE_BYTES = 4096;

// Followed by X, its block sums, and the rings of all warps.
struct SharedStorage {
    alignas(128) ScaleTableOfWarp table[WARPS];
    u64 full[WARPS][PIECES];
    u32 faults[WARPS * 2];
    TileTokens tokens[MOST_X_TILES];
    ExpertWords words;
};
constexpr u32 FIXED_BYTES = (sizeof(SharedStorage) + 127) / 128 * 128;
static_assert(FIXED_BYTES == QG_FIXED_BYTES, "the host computes another size");

// Partition of the rest of shared memory.
struct Room {
    // Resident X tiles, limited by the range and by space, and
    // k-blocks per tile.
    u32 x_tiles, k_blocks;
    XStage* x;
    XSumTable* sums;
    u8* pieces;
    Pieces cut;

    QG_DEVICE Room of(const GemmParams& p, const RowTileRange& range, u8* shared) {
        constexpr u32 REST = QG_SHARED_BYTES - FIXED_BYTES;
        Room room;
        room.k_blocks = p.shape.k_tiles * QG_K_TILE / K_BLOCK;
        const u32 x_bytes = room.k_blocks * sizeof(XStage), sum_bytes = HAS_X_SUM_TABLE ? p.shape.k_tiles * sizeof(XSumTable) : 0;
        const u32 tiles = RowTileRange::tiles(range);
        room.x_tiles = 1;
#pragma unroll
        for (u32 more = 2; more <= MOST_X_TILES; more++)
            if (more <= tiles && more * (x_bytes + sum_bytes) + WARPS * PIECES * LEAST_PIECE_BYTES <= REST) room.x_tiles = more;
        room.x = reinterpret_cast<XStage*>(shared + FIXED_BYTES);
        room.sums = reinterpret_cast<XSumTable*>(room.x + room.x_tiles * room.k_blocks);
        const u32 before = (room.x_tiles * (x_bytes + sum_bytes) + LINE_BYTES - 1) / LINE_BYTES * LINE_BYTES;
        room.pieces = shared + FIXED_BYTES + before;
        room.cut = Pieces::in_bytes(p.shape.k_tiles, REST - before);
        return room;
    }
};

// Loads X of the tiles of rows from `tile` on,
// and its block sums.
// All threads of the CTA call it.
struct XTiles {
    QG_DEVICE void copy(SharedStorage& shared, const GemmParams& given, const Room& room, const RowTileIndex& index, const RowTileRange& range,
                        u32 tile, u32 thread) {
#pragma unroll 1
        for (u32 i = 0; i < room.x_tiles; i++) {
            OwnRows own = {0, 0, 0};
            if ((tile + i) * range.row_tiles < range.end) own = RowTileIndex::find(index, shared.words, given.groups, range.first_place + tile + i);
            copy_x_tile(room.x + i * room.k_blocks, shared.tokens[i], problem_of(given, own), room.k_blocks, thread);
        }
        cp_async_commit_group();
    }
    QG_DEVICE void wait(const GemmParams& given, const Room& room, const XCursor& cursor, u32 warp, u32 lane) {
        cp_async_wait_group<0>();
        cta_barrier();
        if constexpr (!HAS_X_SUM_TABLE) return;
        XSumTable::make(room.sums, room.x, room.x_tiles * given.shape.k_tiles, cursor, warp, WARPS, lane);
        cta_barrier();
    }
};

// A real call keeps one CTA's check out of the hot code.
QG_DEVICE_CALL void look_for_faults(const ExpertGroups& g, u32* words) {
    store_faults<QG_THREADS, 4>(g, words, thread_index(), [] { cta_barrier(); });
}

extern "C" __global__ void __launch_bounds__(QG_THREADS, QG_CTAS_PER_SM)
    qg_sm90_experts_bulk_stream(const __grid_constant__ KernelParams given) {
    SharedStorage& shared = *reinterpret_cast<SharedStorage*>(dynamic_shared());
    const u32 thread = thread_index(), lane = thread % 32, warp = shfl_idx_u32(thread / 32, 0);
    u64* const full = shared.full[warp];
    if (lane == 0) {
#pragma unroll
        for (u32 i = 0; i < PIECES; i++) mbarrier_init(&full[i], 1);
        fence_mbarrier_init();
    }
    warp_barrier();
    // If the index is ready before launch, W is prefetched before
    // the previous launch ends.
    if (!(given.shape.flags & INDEX_READY)) griddepcontrol_wait();
    ExpertWords::load(shared.words, given.groups, thread);
    const RowTileIndex index = RowTileIndex::of(shared.words, given.groups);
    const RowTileRange range = RowTileRange::of_cta(given, index.all);
    const Room room = Room::of(given, range, dynamic_shared());
    const u64 policy = l2_evict_first();
    OwnRows own = RowTileIndex::find(index, shared.words, given.groups, range.first_place);
    WBulkRing ring = WBulkRing::of_warp(room.pieces, full, given, range, room.cut, warp, own);
#pragma unroll 1
    for (u32 i = 0; i < PIECES; i++) WBulkRing::ask(ring, given, index, shared.words, range, room.cut, policy, lane);
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();

    const XCursor cursor = XCursor::of_lane_in_k_steps(lane);
    const bool products = are_products(given);
    u32 row_tile = range.first + warp, taken = 0, place = room.x_tiles;
#pragma unroll 1
    for (u32 tile = 0; tile * range.row_tiles < range.end; tile++, place++) {
        if (place == room.x_tiles) {
            place = 0;
            // All warps have read the previous tiles.
            if (tile > 0) cta_barrier();
            XTiles::copy(shared, given, room, index, range, tile, thread);
            // Overlaps the copies of X and W.
            if (tile == 0 && cta_index().x + 1 == grid_ctas().x)
                look_for_faults(given.groups, shared.faults);
            XTiles::wait(given, room, cursor, warp, lane);
        }
        if (tile > 0) own = RowTileIndex::find(index, shared.words, given.groups, range.first_place + tile);
        const LaneTokens tokens = LaneTokens::of(shared.tokens[place], lane);
        const u32 end = RowTileRange::end_of(range, tile);
#pragma unroll 1
        for (; row_tile < end; row_tile += WARPS) {
            Accumulators acc = {};
            const XStage* columns = room.x + place * room.k_blocks;
            const XSumTable* sums = room.sums + place * given.shape.k_tiles;
            const u8* from = WBulkRing::row_tile_of(given, WBulkRing::weights_of(given, own), row_tile - tile * range.row_tiles);
#pragma unroll 1
            for (u32 left = given.shape.k_tiles; left > 0;) {
                const u32 k_tiles = left < room.cut.k_tiles ? left : room.cut.k_tiles;
                const u8* w = WBulkRing::piece(ring, taken, from);
                mbarrier_wait(&full[taken % PIECES], taken / PIECES % 2);
#pragma unroll 2
                for (u32 i = 0; i < k_tiles; i++, w += QG_K_TILE_BYTES, columns += K_BLOCKS, sums++)
                    multiply_k_tile(acc, *reinterpret_cast<const u8(*)[1][QG_K_TILE_BYTES]>(w), columns, cursor, shared.table[warp], lane,
                                    [&](const XSpan&, u32 tt, u32, u32 sub) {
                                        return HAS_X_SUM_TABLE ? XSumTable::of(*sums, tt, sub, lane) : XBlockSum{};
                                    });
                taken++;
                left -= k_tiles, from += k_tiles * QG_K_TILE_BYTES;
                warp_barrier();
                WBulkRing::ask(ring, given, index, shared.words, range, room.cut, policy, lane);
            }
            store_row_tile(given, own, products, tokens, acc, row_tile - tile * range.row_tiles, lane);
        }
    }
    // A CTA without row tiles has not checked yet.
    if (range.end == 0 && cta_index().x + 1 == grid_ctas().x)
        look_for_faults(given.groups, shared.faults);
}
