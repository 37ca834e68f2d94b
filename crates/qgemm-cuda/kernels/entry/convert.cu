// Converts rows of X for matrix instructions, one token a CTA. Columns are in natural order or gathered, and padded
// with zeros. Values are rounded after the token was multiplied by a power of two. The CTA reads a row from memory
// once: the pass that finds the largest magnitude leaves the row in shared memory. Where the row does not fit, the
// second pass finds it in L1 or L2.
#include "atoms/sync.cuh"
#include "atoms/warp.cuh"
#include "mainloop/convert.cuh"

struct SharedStorage {
    u32 largest[QG_THREADS / 32];
    // The row follows.
};
static_assert(sizeof(SharedStorage) == QG_SHARED_BYTES, "the host computes another size");

// Eight neighbouring elements of X in the source type.
constexpr u32 SOURCE_WORDS = GROUP * SOURCE_BYTES / 4;
struct SourceGroup {
    u32 word[SOURCE_WORDS];

    QG_DEVICE u32 bits(const SourceGroup& group, u32 i) {
        if constexpr (SOURCE_BYTES == 4) return group.word[i % SOURCE_WORDS];
        return group.word[i / 2] >> (16 * (i % 2)) & 0xffffu;
    }
};

// Columns [column, column + GROUP) of a row of X; columns from k on are zero.
QG_DEVICE SourceGroup load_group(const StageX& p, const u8* row, u32 column) {
    SourceGroup group = {};
    if ((p.flags & QG_FLAG_X_ALIGNED16) && column + GROUP <= p.k) {
#pragma unroll
        for (u32 i = 0; i < SOURCE_WORDS; i += 4) {
            const u32x4 v = ld_global_v4(row + (u64)column * SOURCE_BYTES + i * 4);
            group.word[i] = v.x, group.word[i + 1] = v.y, group.word[i + 2] = v.z, group.word[i + 3] = v.w;
        }
        return group;
    }
#pragma unroll
    for (u32 i = 0; i < GROUP; i++) {
        if (column + i >= p.k) continue;
        const u32 bits = load_source(row + (u64)(column + i) * p.x_col * SOURCE_BYTES);
        if constexpr (SOURCE_BYTES == 4)
            group.word[i % SOURCE_WORDS] = bits;
        else
            group.word[i / 2] |= bits << (16 * (i % 2));
    }
    return group;
}

// The same columns, from the row in shared memory.
QG_DEVICE SourceGroup cached_group(const StageX& p, const u8* cached, u32 column) {
    SourceGroup group = {};
    if (column >= p.k) return group;
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

// The bits of one element of the row.
QG_DEVICE u32 row_element(const StageX& p, const u8* row, const u8* cached, u32 source) {
    if (source >= p.k) return 0;
    if (!(p.flags & QG_FLAG_ROW_IN_SHARED)) return load_source(row + (u64)source * p.x_col * SOURCE_BYTES);
    if constexpr (SOURCE_BYTES == 4) return ld_shared(reinterpret_cast<const u32*>(cached) + source);
    return ld_shared(reinterpret_cast<const u16*>(cached) + source);
}

// The values of columns [column, column + GROUP) of the result, not yet scaled.
QG_DEVICE void load_values(const StageX& p, const u8* row, const u8* cached, u32 column, float (&values)[GROUP]) {
    if (p.flags & QG_FLAG_K_ORDER) {
#pragma unroll
        for (u32 i = 0; i < GROUP; i++)
            values[i] = source_value(row_element(p, row, cached, source_column(p, column + i)));
    } else {
        const bool caches_row = p.flags & QG_FLAG_ROW_IN_SHARED;
        const SourceGroup group = caches_row ? cached_group(p, cached, column) : load_group(p, row, column);
#pragma unroll
        for (u32 i = 0; i < GROUP; i++) values[i] = source_value(SourceGroup::bits(group, i));
    }
}

// The largest value of all threads of the CTA.
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

extern "C" __global__ void __launch_bounds__(QG_THREADS) qg_convert(const __grid_constant__ StageX p) {
    SharedStorage& shared = *reinterpret_cast<SharedStorage*>(dynamic_shared());
    u8* cached = dynamic_shared() + sizeof(SharedStorage);
    const u32 thread = thread_index(), threads = cta_threads(), token = cta_index().x;
    const u8* row = reinterpret_cast<const u8*>(p.x) + token * p.x_row * SOURCE_BYTES;
    const bool caches_row = p.flags & QG_FLAG_ROW_IN_SHARED;

    griddepcontrol_launch_dependents();
    griddepcontrol_wait();
    u32 largest = 0;
    if (SCALED || caches_row) {
        for (u32 column = thread * GROUP; column < p.k; column += threads * GROUP) {
            const SourceGroup group = load_group(p, row, column);
            if constexpr (SCALED) {
#pragma unroll
                for (u32 i = 0; i < GROUP; i++)
                    largest = larger_magnitude(largest, source_value(SourceGroup::bits(group, i)));
            }
            if (caches_row) store_row(cached, column, group);
        }
        largest = cta_max(largest, shared.largest);
    }
    TokenScale scale = {1.0f, 1.0f};
    if constexpr (SCALED) {
        scale = TokenScale::of(largest);
        if (thread == 0) store_factor(p, token, scale);
    }
    for (u32 column = thread * GROUP; column < p.columns; column += threads * GROUP) {
        float values[GROUP];
        load_values(p, row, cached, column, values);
        u32 words[GROUP / 2];
#pragma unroll
        for (u32 i = 0; i < GROUP / 2; i++)
            words[i] = converted(values[2 * i] * scale.factor) | converted(values[2 * i + 1] * scale.factor) << 16;
        st_global_v4(converted_group(p, token, column), {words[0], words[1], words[2], words[3]});
    }
}
