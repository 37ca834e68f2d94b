// f32 matmul on CUDA cores with a `cp.async` ring,
// Ampere and newer.
// Operands are row- or column-major, with 16-byte aligned
// contiguous runs.
// Tiles are [k][row] and [k][column].
// Operands along K are transposed by the copy, value by value.
#include "epilogue/matmul_store.cuh"
#include "mainloop/matmul_fma.cuh"

struct SharedStorage {
    FmaStage stage[QG_STAGES];
    u32 last;
};
static_assert(sizeof(SharedStorage) == QG_SHARED_BYTES, "the host computes another size");
static_assert(RUN == 8, "a thread stores its runs together");

extern "C" __global__ void __launch_bounds__(QG_THREADS, QG_CTAS_PER_SM)
    qg_sm80_matmul_fma(const __grid_constant__ MatmulParams given) {
    SharedStorage& shared = *reinterpret_cast<SharedStorage*>(dynamic_shared());
    const u32 thread = thread_index(), rows = part_of_rows(thread), columns = part_of_columns(thread);
    QG_TAKE_MATMUL_TILE(p, tile, given);
    const u8* a_first = reinterpret_cast<const u8*>(p.at.a) + (tile.product * p.at.a_batch + tile.k_first * p.at.a_col) * 4;
    const u8* b_first = reinterpret_cast<const u8*>(p.at.b) + (tile.product * p.at.b_batch + tile.k_first * p.at.b_row) * 4;
    const u32 first_k = tile.begin * QG_TILE_K;
    CopyA a = CopyA::of(a_first, QG_A_ALONG_K ? p.at.a_row : p.at.a_col, tile.row, first_k, thread);
    CopyB b = CopyB::of(b_first, QG_B_ALONG_K ? p.at.b_col : p.at.b_row, tile.column, first_k, thread);
    // K-tiles before this one lie inside both matrices.
    const bool is_inside = tile.row + QG_TILE_M <= p.shape.m && tile.column + QG_TILE_N <= p.shape.n;
    const u32 whole_end = is_inside ? tile.k_len / QG_TILE_K : 0;

    griddepcontrol_launch_dependents();
    griddepcontrol_wait();
    // Copies k-tile `k_tile` to its stage, if there is one.
    // Every call commits a group.
    const auto copy = [&](u32 k_tile, u32 stage) {
        FmaStage& to = shared.stage[stage];
        if (k_tile < whole_end && k_tile < tile.end) {
            CopyA::whole(a, to.a);
            CopyB::whole(b, to.b);
        } else if (k_tile < tile.end) {
            CopyA::part(a, to.a, a_first, p.shape.m, tile.k_len);
            CopyB::part(b, to.b, b_first, p.shape.n, tile.k_len);
        }
        cp_async_commit_group();
    };
#pragma unroll
    for (u32 i = 0; i < QG_STAGES - 1; i++) copy(tile.begin + i, i);
    float acc[ACCUMULATORS] = {};
    u32 stage = 0, free = QG_STAGES - 1;
#pragma unroll 1
    for (u32 k_tile = tile.begin; k_tile < tile.end; k_tile++) {
        cp_async_wait_group<QG_STAGES - 2>();
        // The stage is visible to all threads, and no thread reads the
        // previous one any more.
        cta_barrier();
        copy(k_tile + QG_STAGES - 1, free);
        multiply_stage(acc, shared.stage[stage], rows, columns);
        free = stage;
        stage = stage + 1 == QG_STAGES ? 0 : stage + 1;
    }
    cp_async_wait_group<0>();
    if (p.tiles.splits > 1 && !add_matmul_partials<ACCUMULATORS>(acc, p, tile, thread, &shared.last)) return;
#pragma unroll
    for (u32 i = 0; i < THREAD_ROWS; i++)
#pragma unroll
        for (u32 run = 0; run < THREAD_COLUMNS / RUN; run++) {
            float v[RUN];
#pragma unroll
            for (u32 j = 0; j < RUN; j++) v[j] = acc[i * THREAD_COLUMNS + run * RUN + j];
            store_matmul_run(p, tile.product, tile.row + RowOffsets::row(rows, i), tile.column + ColumnOffsets::column(columns, run), v);
        }
}
