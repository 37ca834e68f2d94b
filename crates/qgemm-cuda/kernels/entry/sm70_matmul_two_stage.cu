// Matmul on tensor cores: D = A · B at any alignment.
// Factors are row- or column-major, of three kinds:
// 16-bit; E4M3 converted to f16, maybe with block scales;
// f32 split into two bf16.
// Tiles pass through registers into two shared stages.
// The next tile loads while the current one is multiplied.
#if QG_ELEMENT_BYTES == 1
#include "atoms/e4m3.cuh"
#endif
#include "epilogue/matmul_warp_store.cuh"
#if QG_ELEMENT_BYTES == 4
#include "mainloop/matmul_bf16x3.cuh"
#elif QG_VARIANT >= 75
#include "mainloop/matmul_mma.cuh"
#else
#include "mainloop/sm70/matmul_m8n8k4.cuh"
#endif
#if QG_BLOCK_SCALED
#include "mainloop/matmul_blocks.cuh"
#endif

struct SharedStorage {
    union {
        MmaStage stage[QG_STAGES];
        MatmulStaging staging[WARPS];
    };
    u32 last;
};
static_assert(sizeof(SharedStorage) == QG_SHARED_BYTES, "the host computes another size");
static_assert(QG_STAGES == 2, "one stage is in flight while the other is multiplied");

// A thread's chunks of a tile, in registers, not converted.
template <class Source>
struct Chunks {
    static constexpr u32 BYTES = Source::ELEMENT_BYTES, ELEMENTS = Source::CHUNK, WORDS = ELEMENTS * BYTES / 4;

    u32 word[Source::COUNT][WORDS];

    // Elements before `k_skip` along K become zeros.
    // They are outside the product.
    QG_DEVICE void load(Chunks& chunks, const Source& s, bool aligned, u32 k_skip) {
#pragma unroll
        for (u32 i = 0; i < Source::COUNT; i++) {
            const u32 elements = Source::elements(s, i);
            u32(&word)[WORDS] = chunks.word[i];
#pragma unroll
            for (u32 w = 0; w < WORDS; w++) word[w] = 0;
            if (aligned && elements == ELEMENTS && s.k[i] >= k_skip) {
#pragma unroll
                for (u32 w = 0; w < WORDS; w += 4) {
                    const u32x4 v = ld_global_v4(s.from[i] + w * 4);
                    word[w] = v.x, word[w + 1] = v.y, word[w + 2] = v.z, word[w + 3] = v.w;
                }
            } else if (elements > 0) {
#pragma unroll
                for (u32 e = 0; e < ELEMENTS; e++) {
                    if (e >= elements || s.k[i] + e < k_skip) continue;
                    if constexpr (BYTES == 4)
                        word[e] = ld_global_u32(s.from[i] + e * 4);
                    else if constexpr (BYTES == 1)
                        word[e / 4] |= ld_global_cached_u8(s.from[i] + e) << (8 * (e % 4));
                    else
                        word[e / 2] |= ld_global_cached_u16(s.from[i] + e * 2) << (16 * (e % 2));
                }
            }
        }
    }

    QG_DEVICE void store(const Chunks& chunks, u8* tile, u32 thread) {
#pragma unroll
        for (u32 i = 0; i < Source::COUNT; i++) {
            u8* to = tile + Source::to(i, thread);
            const u32(&word)[WORDS] = chunks.word[i];
#if QG_ELEMENT_BYTES == 4
            u32 hi[4], lo[4];
#pragma unroll
            for (u32 pair = 0; pair < 4; pair++)
                split_bf16x2(hi[pair], lo[pair], word[pair * 2], word[pair * 2 + 1]);
            st_shared(reinterpret_cast<u32x4*>(to), u32x4{hi[0], hi[1], hi[2], hi[3]});
            st_shared(reinterpret_cast<u32x4*>(to + Source::TILE_BYTES), u32x4{lo[0], lo[1], lo[2], lo[3]});
#elif QG_ELEMENT_BYTES == 1
            u32 pair[8];
#pragma unroll
            for (u32 w = 0; w < 4; w++)
                pair[w * 2] = e4m3_pair_f16<0, 1>(word[w]), pair[w * 2 + 1] = e4m3_pair_f16<2, 3>(word[w]);
            // Adjacent threads whose lower halves share banks
            // store different halves first.
            const bool swap = Source::begins_with_upper(thread + i * QG_THREADS);
            const u32x4 lower = {pair[0], pair[1], pair[2], pair[3]}, upper = {pair[4], pair[5], pair[6], pair[7]};
            u8* const to_upper = tile + Source::to(i, thread, CHUNK);
            st_shared(reinterpret_cast<u32x4*>(swap ? to_upper : to), swap ? upper : lower);
            st_shared(reinterpret_cast<u32x4*>(swap ? to : to_upper), swap ? lower : upper);
#else
            st_shared(reinterpret_cast<u32x4*>(to), u32x4{word[0], word[1], word[2], word[3]});
#endif
        }
    }
};

extern "C" __global__ void __launch_bounds__(QG_THREADS, QG_CTAS_PER_SM)
    qg_sm70_matmul_two_stage(const __grid_constant__ MatmulParams given) {
    SharedStorage& shared = *reinterpret_cast<SharedStorage*>(dynamic_shared());
    const u32 thread = thread_index(), lane = thread % 32, warp = thread / 32;
    QG_TAKE_MATMUL_TILE(p, tile, given);
    SourceA a = source_a(p, tile, thread);
    SourceB b = source_b(p, tile, thread);
    Chunks<SourceA> next_a;
    Chunks<SourceB> next_b;

    griddepcontrol_launch_dependents();
    griddepcontrol_wait();
#if QG_BLOCK_SCALED
    const u32 k_skip = tile.k_skip;
#else
    constexpr u32 k_skip = 0;
#endif
    const auto load = [&]() {
        Chunks<SourceA>::load(next_a, a, p.tiles.a_aligned16 != 0, k_skip);
        Chunks<SourceB>::load(next_b, b, p.tiles.b_aligned16 != 0, k_skip);
        SourceA::advance(a);
        SourceB::advance(b);
    };
    const auto store = [&](u32 stage) {
        Chunks<SourceA>::store(next_a, shared.stage[stage].a, thread);
        Chunks<SourceB>::store(next_b, shared.stage[stage].b, thread);
    };
    if (tile.begin < tile.end) {
        load();
        store(0);
    }
    cta_barrier();
    Accumulators acc = {};
#if QG_BLOCK_SCALED
    Accumulators of_block = {};
#endif
    u32 stage = 0;
#pragma unroll 1
    for (u32 k_tile = tile.begin; k_tile < tile.end; k_tile++) {
        const bool more = k_tile + 1 < tile.end;
        if (more) load();
#if QG_BLOCK_SCALED
        const bool ends_block = (k_tile + 1) % (BLOCK / QG_TILE_K) == 0 || !more;
        LaneScales scales;
        if (ends_block) LaneScales::load(scales, p, tile, k_tile * QG_TILE_K / BLOCK, warp, lane);
        multiply_stage(of_block, shared.stage[stage], warp, lane);
        if (ends_block) add_block(acc, of_block, scales);
#else
        multiply_stage(acc, shared.stage[stage], warp, lane);
#endif
        stage ^= 1;
        if (more) store(stage);
        cta_barrier();
    }
    float* all = reinterpret_cast<float*>(&acc);
    if (p.tiles.splits > 1 && !add_matmul_partials<ACCUMULATORS>(all, p, tile, thread, &shared.last)) return;
    store_matmul_tile(acc, p, tile, shared.staging[warp], warp, lane);
}
