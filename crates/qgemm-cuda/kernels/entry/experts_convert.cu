// MoE X prologue: converts X to the type that the product
// multiplies, one CTA per row. It also stores the factor of each
// product row: the inverse of the row's power of two,
// times the given factor. The second read hits L1 or L2.
#include "atoms/sync.cuh"
#include "atoms/warp.cuh"
#include "mainloop/convert.cuh"

struct ExpertConvertParams {
    // X; converted rows; given factors of
    // product rows, or 0; combined factors.
    u64 x, to, factors, to_factors;
    // Row strides in elements.
    u64 x_row, to_row;
    // Rows of X, and product rows per row of X; columns of
    // X, and of the converted rows, which are whole groups.
    u32 rows, sharers, columns, to_columns;
    // Whether rows of X are 16-byte aligned.
    u32 aligned16, unused;
};
static_assert(sizeof(ExpertConvertParams) == 72, "the host lays out another size");

// Loads columns [column, column + GROUP) of a
// row of X; columns beyond the last are zeros.
QG_DEVICE void load_columns(const ExpertConvertParams& p, const u8* row, u32 column, float (&values)[GROUP]) {
    constexpr u32 WORDS = GROUP * SOURCE_BYTES / 4;
    if (p.aligned16 && column + GROUP <= p.columns) {
        u32 word[WORDS];
#pragma unroll
        for (u32 i = 0; i < WORDS; i += 4) {
            const u32x4 v = ld_global_v4(row + (u64)column * SOURCE_BYTES + i * 4);
            word[i] = v.x, word[i + 1] = v.y, word[i + 2] = v.z, word[i + 3] = v.w;
        }
#pragma unroll
        for (u32 i = 0; i < GROUP; i++)
            values[i] = source_value(SOURCE_BYTES == 4 ? word[i % WORDS] : word[i / 2] >> i % 2 * 16 & 0xffffu);
        return;
    }
#pragma unroll
    for (u32 i = 0; i < GROUP; i++)
        values[i] = column + i < p.columns ? source_value(load_source(row + (u64)(column + i) * SOURCE_BYTES)) : 0.0f;
}

// Maximum over all threads.
QG_DEVICE u32 cta_max(u32 value, u32* of_warps) {
#pragma unroll
    for (u32 mask = 16; mask > 0; mask /= 2) {
        const u32 other = shfl_xor_u32(value, mask);
        value = other > value ? other : value;
    }
    if (thread_index() % 32 == 0) st_shared(&of_warps[thread_index() / 32], value);
    cta_barrier();
    for (u32 warp = 0; warp < QG_THREADS / 32; warp++) {
        const u32 other = ld_shared(&of_warps[warp]);
        value = other > value ? other : value;
    }
    return value;
}

QG_DEVICE RowScale scale_of(const ExpertConvertParams& p, const u8* x, u32 thread, u32* of_warps) {
    u32 largest = 0;
#pragma unroll 4
    for (u32 column = thread * GROUP; column < p.columns; column += QG_THREADS * GROUP) {
        float values[GROUP];
        load_columns(p, x, column, values);
#pragma unroll
        for (u32 i = 0; i < GROUP; i++) largest = larger_magnitude(largest, values[i]);
    }
    return RowScale::of(cta_max(largest, of_warps));
}

extern "C" __global__ void __launch_bounds__(QG_THREADS) qg_experts_convert(const __grid_constant__ ExpertConvertParams p) {
    u32* of_warps = reinterpret_cast<u32*>(dynamic_shared());
    const u32 row = cta_index().x, thread = thread_index();
    griddepcontrol_launch_dependents();
    griddepcontrol_wait();
    // The grid may exceed the rows.
    if (row >= p.rows) return;
    const u8* x = reinterpret_cast<const u8*>(p.x) + row * p.x_row * SOURCE_BYTES;
    RowScale scale = {1.0f, 1.0f};
    if constexpr (SCALED) {
        scale = scale_of(p, x, thread, of_warps);
        for (u32 i = thread; i < p.sharers; i += QG_THREADS) {
            const u64 own = ((u64)row * p.sharers + i) * 4;
            const float beside = p.factors == 0 ? 1.0f : bits_to_f32(ld_global_u32(reinterpret_cast<const u8*>(p.factors) + own));
            st_global_u32(reinterpret_cast<u8*>(p.to_factors) + own, f32_to_bits(scale.inverse * beside));
        }
    }
    u8* to = reinterpret_cast<u8*>(p.to) + row * p.to_row * D_BYTES;
#pragma unroll 4
    for (u32 column = thread * GROUP; column < p.to_columns; column += QG_THREADS * GROUP) {
        float values[GROUP];
        load_columns(p, x, column, values);
        u32 word[GROUP * D_BYTES / 4];
#pragma unroll
        for (u32 i = 0; i < GROUP * D_BYTES / 4; i++)
            word[i] = D_BYTES == 4 ? converted(values[i])
                                   : converted(values[i * 2 % GROUP] * scale.factor) |
                                         converted(values[(i * 2 + 1) % GROUP] * scale.factor) << 16;
#pragma unroll
        for (u32 i = 0; i < GROUP * D_BYTES / 4; i += 4)
            st_global_v4(to + (u64)column * D_BYTES + i * 4, u32x4{word[i], word[i + 1], word[i + 2], word[i + 3]});
    }
}
