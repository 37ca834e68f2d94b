// Type and layout conversion of a matrix, one CTA per
// row. Columns may be permuted and are padded with
// zeros. With row factors, each row is multiplied by a
// power of two before rounding. The first pass finds the
// row maximum and caches the row in shared memory; a row
// that does not fit is read again through L1 or L2.
#include "atoms/sync.cuh"
#include "atoms/warp.cuh"
#include "mainloop/convert.cuh"

struct SharedStorage {
    u32 largest[QG_THREADS / 32];
    // The row follows.
};
static_assert(sizeof(SharedStorage) == QG_SHARED_BYTES, "the host computes another size");

// Eight adjacent elements of X in the source type.
constexpr u32 SOURCE_WORDS = GROUP * SOURCE_BYTES / 4;
struct SourceGroup {
    u32 word[SOURCE_WORDS];

    QG_DEVICE u32 bits(const SourceGroup& group, u32 i) {
        if constexpr (SOURCE_BYTES == 4) return group.word[i % SOURCE_WORDS];
        return group.word[i / 2] >> (16 * (i % 2)) & 0xffffu;
    }
};

// Loads columns [column, column + GROUP) of a
// row of X; columns beyond the last are zero.
QG_DEVICE SourceGroup load_group(const ConvertParams& p, const u8* row, u32 column) {
    SourceGroup group = {};
    if ((p.shape.flags & QG_FLAG_X_ALIGNED16) && column + GROUP <= p.shape.columns) {
#pragma unroll
        for (u32 i = 0; i < SOURCE_WORDS; i += 4) {
            const u32x4 v = ld_global_v4(row + (u64)column * SOURCE_BYTES + i * 4);
            group.word[i] = v.x, group.word[i + 1] = v.y, group.word[i + 2] = v.z, group.word[i + 3] = v.w;
        }
        return group;
    }
#pragma unroll
    for (u32 i = 0; i < GROUP; i++) {
        if (column + i >= p.shape.columns) continue;
        const u32 bits = load_source(row + (u64)(column + i) * p.at.x_col * SOURCE_BYTES);
        if constexpr (SOURCE_BYTES == 4)
            group.word[i % SOURCE_WORDS] = bits;
        else
            group.word[i / 2] |= bits << (16 * (i % 2));
    }
    return group;
}

// Loads these columns from the cached row.
QG_DEVICE SourceGroup cached_group(const ConvertParams& p, const u8* cached, u32 column) {
    SourceGroup group = {};
    if (column >= p.shape.columns) return group;
#pragma unroll
    for (u32 i = 0; i < SOURCE_WORDS; i += 4) {
        const u32x4 v = ld_shared(reinterpret_cast<const u32x4*>(cached + column * SOURCE_BYTES + i * 4));
        group.word[i] = v.x, group.word[i + 1] = v.y, group.word[i + 2] = v.z, group.word[i + 3] = v.w;
    }
    return group;
}

QG_DEVICE void store_row(u8* cached, u32 column, const SourceGroup& group) {
#pragma unroll
    for (u32 i = 0; i < SOURCE_WORDS; i += 4)
        st_shared(reinterpret_cast<u32x4*>(cached + column * SOURCE_BYTES + i * 4),
                  u32x4{group.word[i], group.word[i + 1], group.word[i + 2], group.word[i + 3]});
}

// Bits of one element of the row.
QG_DEVICE u32 row_element(const ConvertParams& p, const u8* row, const u8* cached, u32 source) {
    if (source >= p.shape.columns) return 0;
    if (!(p.shape.flags & QG_FLAG_ROW_IN_SHARED)) return load_source(row + (u64)source * p.at.x_col * SOURCE_BYTES);
    if constexpr (SOURCE_BYTES == 4) return ld_shared(reinterpret_cast<const u32*>(cached) + source);
    return ld_shared(reinterpret_cast<const u16*>(cached) + source);
}

// Unscaled values of columns [column, column + GROUP) of D.
QG_DEVICE void load_values(const ConvertParams& p, const u8* row, const u8* cached, u32 column, float (&values)[GROUP]) {
    if (p.shape.flags & QG_FLAG_K_ORDER) {
#pragma unroll
        for (u32 i = 0; i < GROUP; i++)
            values[i] = source_value(row_element(p, row, cached, source_column(p, column + i)));
    } else {
        const bool caches_row = p.shape.flags & QG_FLAG_ROW_IN_SHARED;
        const SourceGroup group = caches_row ? cached_group(p, cached, column) : load_group(p, row, column);
#pragma unroll
        for (u32 i = 0; i < GROUP; i++) values[i] = source_value(SourceGroup::bits(group, i));
    }
}

// Maximum over the threads of the CTA.
QG_DEVICE u32 cta_max(u32 value, u32* warps) {
#pragma unroll
    for (u32 mask = 16; mask > 0; mask /= 2) {
        const u32 other = shfl_xor_u32(value, mask);
        value = other > value ? other : value;
    }
    const u32 thread = thread_index();
    if (thread % 32 == 0) st_shared(&warps[thread / 32], value);
    cta_barrier();
    for (u32 warp = 0; warp < cta_threads() / 32; warp++) {
        const u32 other = ld_shared(&warps[warp]);
        value = other > value ? other : value;
    }
    return value;
}

extern "C" __global__ void __launch_bounds__(QG_THREADS) qg_convert(const __grid_constant__ ConvertParams p) {
    SharedStorage& shared = *reinterpret_cast<SharedStorage*>(dynamic_shared());
    u8* cached_row = dynamic_shared() + sizeof(SharedStorage);
    const u32 thread = thread_index(), threads = cta_threads(), row_index = cta_index().x;
    const u8* row = reinterpret_cast<const u8*>(p.at.x) + row_index * p.at.x_row * SOURCE_BYTES;
    const bool caches_row = p.shape.flags & QG_FLAG_ROW_IN_SHARED;

    griddepcontrol_launch_dependents();
    griddepcontrol_wait();
    u32 largest = 0;
    if (SCALED || caches_row) {
        for (u32 column = thread * GROUP; column < p.shape.columns; column += threads * GROUP) {
            const SourceGroup group = load_group(p, row, column);
            if constexpr (SCALED) {
#pragma unroll
                for (u32 i = 0; i < GROUP; i++)
                    largest = larger_magnitude(largest, source_value(SourceGroup::bits(group, i)));
            }
            if (caches_row) store_row(cached_row, column, group);
        }
        largest = cta_max(largest, shared.largest);
    }
    RowScale scale = {1.0f, 1.0f};
    if constexpr (SCALED) {
        scale = RowScale::of(largest);
        if (thread == 0) store_factor(p, row_index, scale);
    }
    for (u32 column = thread * GROUP; column < p.shape.d_columns; column += threads * GROUP) {
        float values[GROUP];
        load_values(p, row, cached_row, column, values);
        ConvertedGroup group;
#pragma unroll
        for (u32 i = 0; i < GROUP; i++) {
            const u32 bits = converted(values[i] * scale.factor);
            if constexpr (D_BYTES == 4)
                group.word[i % (GROUP * D_BYTES / 4)] = bits;
            else if (i % 2 == 0)
                group.word[i / 2] = bits;
            else
                group.word[i / 2] |= bits << 16;
        }
        ConvertedGroup::store(group, p, row_index, column);
    }
}
