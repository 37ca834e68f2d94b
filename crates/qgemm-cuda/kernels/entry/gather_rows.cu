// Row gather: D[i, :] = scale * W[ids[i], :].
// The lanes that hold a row in a packed tile
// decode it, a k-tile each.
// The last CTA looks for ids outside W.
#include "atoms/launch.cuh"
#include "atoms/sync.cuh"
#include "dequant/operand.cuh"
#include "epilogue/operands.cuh"
#include "generated/abi.cuh"

struct GatherRowsParams {
    GatherRowsShape shape;
    GatherRowsPointers at;
};

// Lanes of a tile that hold a row.
constexpr u32 ROW_LANES = QG_MMA_M8N8K4 ? 1 : 4;
constexpr u32 CTA_K_TILES = QG_THREADS / ROW_LANES;
constexpr u32 NONE = 0xffffffffu;

struct SharedStorage {
    u32 first_fault[QG_THREADS];
};
static_assert(sizeof(SharedStorage) == QG_SHARED_BYTES, "the host computes another size");

QG_DEVICE u32 id_of(const GatherRowsParams& p, u32 row) {
    return ld_global_u32(reinterpret_cast<const u8*>(p.at.ids) + (u64)row * 4);
}

// Writes the status: code, row, 0, id.
QG_DEVICE void write_status(const GatherRowsParams& p, SharedStorage& shared, u32 thread) {
    u32 first = NONE;
    for (u32 row = thread; row < p.shape.rows && first == NONE; row += QG_THREADS)
        if (id_of(p, row) >= p.shape.table_rows) first = row;
    st_shared(&shared.first_fault[thread], first);
    cta_barrier();
    if (thread != 0) return;
    for (u32 i = 1; i < QG_THREADS; i++) {
        const u32 other = ld_shared(&shared.first_fault[i]);
        first = other < first ? other : first;
    }
    const bool fault = first != NONE;
    u8* status = reinterpret_cast<u8*>(p.at.status);
    st_global_u32(status, fault ? 1 : 0);
    st_global_u32(status + 4, fault ? first : 0);
    st_global_u32(status + 8, 0);
    st_global_u32(status + 12, fault ? id_of(p, first) : 0);
}

// Stores one value of stored column `stored`.
// Padding columns exceed D's last column.
QG_DEVICE void store_column(const GatherRowsParams& p, u32 row, u32 stored, float value) {
    const u32 column = p.shape.flags & QG_FLAG_K_ORDER
                           ? ld_global_u32(reinterpret_cast<const u8*>(p.at.k_order) + (u64)stored * 4)
                           : stored;
    if (column < p.shape.k) store_dense(p.shape.d_dtype, p.at.d, row * p.at.d_row + column, value);
}

extern "C" __global__ void __launch_bounds__(QG_THREADS, 1) qg_gather_rows(const __grid_constant__ GatherRowsParams p) {
    SharedStorage& shared = *reinterpret_cast<SharedStorage*>(dynamic_shared());
    const u32 thread = thread_index(), cta = cta_index().x;
    griddepcontrol_launch_dependents();
    griddepcontrol_wait();
    if (cta == p.shape.rows * p.shape.row_ctas) {
        write_status(p, shared, thread);
        return;
    }
    const u32 row = cta / p.shape.row_ctas, wanted = cta % p.shape.row_ctas * CTA_K_TILES + thread / ROW_LANES;
    // Threads beyond the last k-tile decode it
    // again and store nothing.
    const bool stores = wanted < p.shape.k_tiles;
    const u32 k_tile = stores ? wanted : p.shape.k_tiles - 1;
    const u32 id = id_of(p, row);
    const bool known = id < p.shape.table_rows;
    // An id outside W gives zeros.
    const u32 n = known ? id : 0, of_tile = n % QG_TILE_ROWS;
    const u32 lane_row = QG_MMA_M8N8K4 ? 0 : of_tile / 8, of_row = thread % ROW_LANES;
    const u32 lane = QG_MMA_M8N8K4 ? of_tile : of_tile % 8 * 4 + of_row;
    const bool scaled = p.shape.flags & QG_FLAG_ROW_SCALE;
    const float factor =
        (scaled ? bits_to_f32(ld_global_u32(reinterpret_cast<const u8*>(p.at.row_scale) + (u64)n * 4)) : 1.0f) * p.shape.scale;

    const u8* bytes =
        reinterpret_cast<const u8*>(p.at.w) + ((u64)(n / QG_TILE_ROWS) * p.shape.k_tiles + k_tile) * QG_K_TILE_BYTES;
    KTile codes;
    KTile::load_scales<FromGlobal>(codes, bytes, lane);
#pragma unroll
    for (u32 k_block = 0; k_block < K_BLOCKS; k_block++) {
        KTile::load_codes<FromGlobal>(codes, bytes, k_block, lane);
#pragma unroll
        for (u32 held = 0; held < LANE_ROWS; held++) {
            if (held != lane_row) continue;
#pragma unroll
            for (u32 k_step = 0; k_step < K_STEPS; k_step++) {
                const u32 sub_block = sub_block_of(k_block, k_step / K_STEPS_PER_PARTIAL);
                const float scale = Operands::scale(codes, held, sub_block), min = Operands::min(codes, held, sub_block);
                float w[4];
                Operands::quad_f32(codes, quad_of(k_block, held, k_step), w);
#pragma unroll
                for (u32 i = 0; i < 4; i++) {
                    const u32 of_step = QG_MMA_M8N8K4 ? i : of_row * 2 + i % 2 + i / 2 * 8;
                    const u32 column = k_tile * QG_K_TILE + k_block * K_BLOCK + k_step * K_STEP + of_step;
                    if (stores) store_column(p, row, column, known ? (scale * w[i] + min) * factor : 0.0f);
                }
            }
        }
    }
}
