// Matmul on MMA with a `cp.async` ring, Ampere and newer.
// Operands are 16-bit, or f32 rounded to TF32, row- or
// column-major, with 16-byte aligned contiguous runs.
// From Ada on also E4M3 along K, with or without block scales.
#include "atoms/cp_async.cuh"
#include "epilogue/matmul_warp_store.cuh"
#if QG_ELEMENT_BYTES == 4
#include "mainloop/matmul_tf32.cuh"
#elif QG_ELEMENT_BYTES == 1
#if QG_BLOCK_SCALED
#include "mainloop/matmul_blocks.cuh"
#endif
#include "mainloop/matmul_e4m3_mma.cuh"
#else
#include "mainloop/matmul_mma.cuh"
#endif

struct SharedStorage {
    union {
        MmaStage stage[QG_STAGES];
        MatmulStaging staging[WARPS];
    };
    u32 last;
};
static_assert(sizeof(SharedStorage) == QG_SHARED_BYTES, "the host computes another size");

#if QG_BLOCK_SCALED
// Copies the chunk where a part of K starts.
// Codes before `k_skip` become zero.
template <class Source>
QG_DEVICE void copy_first_chunk(u8* to, const Source& s, u32 i, u32 elements, u32 k_skip) {
    u32 word[4] = {};
#pragma unroll
    for (u32 e = 0; e < Source::CHUNK; e++)
        if (e < elements && s.k[i] + e >= k_skip) word[e / 4] |= ld_global_cached_u8(s.from[i] + e) << (8 * (e % 4));
    st_shared(reinterpret_cast<u32x4*>(to), u32x4{word[0], word[1], word[2], word[3]});
}
#endif

template <class Source>
QG_DEVICE void copy_tile(u8* tile, const Source& s, u32 thread, u32 k_skip) {
#pragma unroll
    for (u32 i = 0; i < Source::COUNT; i++) {
        u32 elements = Source::elements(s, i);
#if QG_BLOCK_SCALED
        if (s.k[i] < k_skip) {
            if (s.k[i] + Source::CHUNK > k_skip) {
                copy_first_chunk(tile + Source::to(i, thread), s, i, elements, k_skip);
                continue;
            }
            elements = 0;
        }
#endif
        // Unread chunks still need a valid address.
        cp_async_16(tile + Source::to(i, thread), elements > 0 ? s.from[i] : s.first,
                    elements * Source::ELEMENT_BYTES);
    }
}

extern "C" __global__ void __launch_bounds__(QG_THREADS, QG_CTAS_PER_SM)
    qg_sm80_matmul_cp_async(const __grid_constant__ MatmulParams given) {
    SharedStorage& shared = *reinterpret_cast<SharedStorage*>(dynamic_shared());
    const u32 thread = thread_index(), lane = thread % 32, warp = thread / 32;
    QG_TAKE_MATMUL_TILE(p, tile, given);
    SourceA a = source_a(p, tile, thread);
    SourceB b = source_b(p, tile, thread);

#if QG_BLOCK_SCALED
    const u32 k_skip = tile.k_skip;
#else
    constexpr u32 k_skip = 0;
#endif

    griddepcontrol_launch_dependents();
    griddepcontrol_wait();
    // Copies k-tile `k_tile` to its stage, if there is one.
    // Every call commits a group.
    const auto copy = [&](u32 k_tile, u32 stage) {
        if (k_tile < tile.end) {
            copy_tile(shared.stage[stage].a, a, thread, k_skip);
            copy_tile(shared.stage[stage].b, b, thread, k_skip);
            SourceA::advance(a);
            SourceB::advance(b);
        }
        cp_async_commit_group();
    };
#pragma unroll
    for (u32 i = 0; i < QG_STAGES - 1; i++) copy(tile.begin + i, i);
    Accumulators acc = {};
#if QG_ELEMENT_BYTES == 1
    Accumulators of_block = {};
#endif
    u32 stage = 0, free = QG_STAGES - 1;
#pragma unroll 1
    for (u32 k_tile = tile.begin; k_tile < tile.end; k_tile++) {
        cp_async_wait_group<QG_STAGES - 2>();
        // The stage is visible to all threads, and no thread reads the
        // previous one any more.
        cta_barrier();
        copy(k_tile + QG_STAGES - 1, free);
#if QG_BLOCK_SCALED
        const bool ends_block = (k_tile + 1) % (BLOCK / QG_TILE_K) == 0 || k_tile + 1 == tile.end;
        LaneScales scales;
        if (ends_block) LaneScales::load(scales, p, tile, k_tile * QG_TILE_K / BLOCK, warp, lane);
        multiply_stage(of_block, shared.stage[stage], warp, lane);
        if (ends_block) add_block(acc, of_block, scales);
#elif QG_ELEMENT_BYTES == 1
        multiply_stage(of_block, shared.stage[stage], warp, lane);
        if ((k_tile + 1) % SUMMED_TILES == 0 || k_tile + 1 == tile.end) add_sums(acc, of_block);
#else
        multiply_stage(acc, shared.stage[stage], warp, lane);
#endif
        free = stage;
        stage = stage + 1 == QG_STAGES ? 0 : stage + 1;
    }
    cp_async_wait_group<0>();
    cta_barrier();
    float* all = reinterpret_cast<float*>(&acc);
    if (p.tiles.splits > 1 && !add_matmul_partials<ACCUMULATORS>(all, p, tile, thread, &shared.last)) return;
    store_matmul_tile(acc, p, tile, shared.staging[warp], warp, lane);
}
