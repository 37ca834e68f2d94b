// Per-token quantization of X: one CTA per row. The first pass
// finds the row maximum and caches the row in shared memory; a
// row that does not fit is read again through L1 or L2.
#include "mainloop/quantize.cuh"

struct SharedStorage {
    u32 largest[QG_THREADS / 32];
    // The row follows.
};
static_assert(sizeof(SharedStorage) == QG_SHARED_BYTES, "the host computes another size");

// Maximum over all threads.
QG_DEVICE u32 cta_max(u32 value, u32* of_warps) {
#pragma unroll
    for (u32 mask = 16; mask > 0; mask /= 2) value = larger(value, shfl_xor_u32(value, mask));
    const u32 warp = thread_index() / 32, warps = cta_threads() / 32;
    if (thread_index() % 32 == 0) st_shared(&of_warps[warp], value);
    cta_barrier();
    for (u32 w = 0; w < warps; w++) value = larger(value, ld_shared(&of_warps[w]));
    return value;
}

QG_DEVICE void keep(u8* cached, u32 column, const SourceGroup& group) {
#pragma unroll
    for (u32 i = 0; i < SOURCE_WORDS; i += 4)
        st_shared(reinterpret_cast<u32x4*>(cached + column * SOURCE_BYTES + i * 4),
                  u32x4{group.word[i], group.word[i + 1], group.word[i + 2], group.word[i + 3]});
}

QG_DEVICE SourceGroup kept(const u8* cached, u32 column) {
    SourceGroup group;
#pragma unroll
    for (u32 i = 0; i < SOURCE_WORDS; i += 4) {
        const u32x4 v = ld_shared(reinterpret_cast<const u32x4*>(cached + column * SOURCE_BYTES + i * 4));
        group.word[i] = v.x, group.word[i + 1] = v.y, group.word[i + 2] = v.z, group.word[i + 3] = v.w;
    }
    return group;
}

extern "C" __global__ void __launch_bounds__(QG_THREADS)
    qg_quantize_tokens(const __grid_constant__ QuantizeParams p) {
    SharedStorage& shared = *reinterpret_cast<SharedStorage*>(dynamic_shared());
    u8* cached = dynamic_shared() + sizeof(SharedStorage);
    const u32 row = cta_index().x, first = thread_index() * GROUP, step = cta_threads() * GROUP;
    // The grid may exceed the rows.
    if (row >= p.shape.rows) return;
    const u8* source = reinterpret_cast<const u8*>(p.at.x) + row * p.at.x_row * SOURCE_BYTES;
    const bool caches = p.shape.flags & QG_FLAG_ROW_IN_SHARED;

    griddepcontrol_launch_dependents();
    griddepcontrol_wait();
    u32 largest = 0;
#pragma unroll 2
    for (u32 column = first; column < p.shape.stored_columns; column += step) {
        const SourceGroup group = SourceGroup::load(p, source, column);
        if (caches) keep(cached, column, group);
        largest = larger(largest, QG_FACTOR == FACTOR_PER_TOKEN ? largest_finite_of(group) : largest_of(group));
    }
    largest = cta_max(largest, shared.largest);

    if constexpr (QG_FACTOR == FACTOR_PER_TOKEN) {
        const float factor = f32_scale(largest, MOST_NVFP4);
        if (thread_index() == 0)
            st_global_u32(reinterpret_cast<u8*>(p.at.token_factors) + (u64)row * 4, f32_to_bits(factor));
        const float inverse = rcp_rn_f32(factor);
        // Whole warps iterate together: lanes compare by shuffles.
        for (u32 column = first; column - thread_index() % 32 * GROUP < p.shape.stored_columns; column += step) {
            const bool stores = column < p.shape.stored_columns;
            const SourceGroup group = caches && stores ? kept(cached, column) : SourceGroup::load(p, source, column);
            quantize_in_warp(p.at, group, row, column, stores, inverse);
        }
    } else {
        const BlockScale scale = BlockScale::of_block(largest, 1.0f);
        if (thread_index() == 0)
            st_global_u32(reinterpret_cast<u8*>(p.at.scales) + row * p.at.scales_row, scale.stored);
        u8* codes = reinterpret_cast<u8*>(p.at.codes) + row * p.at.codes_row;
        for (u32 column = first; column < p.shape.stored_columns; column += step) {
            const SourceGroup group = caches ? kept(cached, column) : SourceGroup::load(p, source, column);
            store_codes(codes, column, codes_of(group, scale));
        }
    }
}
