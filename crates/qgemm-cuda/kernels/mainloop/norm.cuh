// RMSNorm and LayerNorm: column groups of any
// type, row sums, row statistics, and stores.
#pragma once
#include "atoms/float.cuh"
#include "atoms/launch.cuh"
#include "atoms/memory.cuh"
#include "atoms/rounded.cuh"
#include "atoms/sync.cuh"
#include "atoms/warp.cuh"
#include "generated/abi.cuh"
#include "mainloop/column_group.cuh"

// Kernel parameter.
struct NormParams {
    NormShape shape;
    NormPointers at;
};

// Indices into NormShape::types.
constexpr u32 TYPE_X = 0, TYPE_RESIDUAL = 1, TYPE_SUM = 2, TYPE_D = 3, TYPE_GAMMA = 4, TYPE_BETA = 5;

QG_DEVICE u32 type_of(const NormParams& p, u32 place) {
    return p.shape.types >> (4 * place) & 15u;
}

QG_DEVICE u32 bytes_of(u32 dtype) {
    return dtype == DTYPE_F32 ? 4 : 2;
}

// A row of an operand.
struct OperandRow {
    u8* start;
    u32 dtype;
    // Whether the row is 16-byte aligned.
    bool aligned;

    QG_DEVICE OperandRow of(const NormParams& p, u64 address, u64 stride, u32 row, u32 place, u32 aligned_flag) {
        const u32 dtype = type_of(p, place);
        u8* start = reinterpret_cast<u8*>(address) + row * stride * bytes_of(dtype);
        return {start, dtype, (p.shape.flags & aligned_flag) != 0};
    }
    QG_DEVICE OperandRow x(const NormParams& p, u32 row) {
        return of(p, p.at.x, p.at.x_row, row, TYPE_X, QG_FLAG_X_ALIGNED16);
    }
    QG_DEVICE OperandRow residual(const NormParams& p, u32 row) {
        return of(p, p.at.residual, p.at.residual_row, row, TYPE_RESIDUAL, QG_FLAG_RESIDUAL_ALIGNED16);
    }
    QG_DEVICE OperandRow sum(const NormParams& p, u32 row) {
        return of(p, p.at.sum, p.at.sum_row, row, TYPE_SUM, QG_FLAG_SUM_ALIGNED16);
    }
    QG_DEVICE OperandRow d(const NormParams& p, u32 row) {
        return of(p, p.at.d, p.at.d_row, row, TYPE_D, QG_FLAG_D_ALIGNED16);
    }
    QG_DEVICE OperandRow gamma(const NormParams& p) {
        return of(p, p.at.gamma, 0, 0, TYPE_GAMMA, QG_FLAG_GAMMA_ALIGNED16);
    }
    QG_DEVICE OperandRow beta(const NormParams& p) {
        return of(p, p.at.beta, 0, 0, TYPE_BETA, QG_FLAG_BETA_ALIGNED16);
    }

    // Loads one element as f32.
    QG_DEVICE float element(const OperandRow& row, u32 column) {
        if (row.dtype == DTYPE_F32) return bits_to_f32(ld_global_u32(row.start + (u64)column * 4));
        const u32 bits = ld_global_cached_u16(row.start + (u64)column * 2);
        return row.dtype == DTYPE_F16 ? f16_to_f32(bits) : bf16_to_f32(bits);
    }
};

// GROUP adjacent stored elements; 16-bit types are packed two a word.
struct StoredGroup {
    u32 word[GROUP];

    // Loads columns [column, column + GROUP);
    // columns from `columns` on become zeros.
    QG_DEVICE StoredGroup load(const OperandRow& row, u32 column, u32 columns) {
        StoredGroup group = {};
        if (row.aligned && column + GROUP <= columns) {
            const u8* at = row.start + (u64)column * bytes_of(row.dtype);
            const u32x4 low = ld_global_v4(at);
            group.word[0] = low.x, group.word[1] = low.y, group.word[2] = low.z, group.word[3] = low.w;
            if (row.dtype == DTYPE_F32) {
                const u32x4 high = ld_global_v4(at + 16);
                group.word[4] = high.x, group.word[5] = high.y, group.word[6] = high.z, group.word[7] = high.w;
            }
            return group;
        }
#pragma unroll
        for (u32 i = 0; i < GROUP; i++) {
            if (column + i >= columns) continue;
            if (row.dtype == DTYPE_F32)
                group.word[i] = ld_global_u32(row.start + (u64)(column + i) * 4);
            else
                group.word[i / 2] |= ld_global_cached_u16(row.start + (u64)(column + i) * 2) << (16 * (i % 2));
        }
        return group;
    }

    QG_DEVICE void store(const StoredGroup& group, const OperandRow& row, u32 column, u32 columns) {
        if (row.aligned && column + GROUP <= columns) {
            u8* at = row.start + (u64)column * bytes_of(row.dtype);
            st_global_v4(at, u32x4{group.word[0], group.word[1], group.word[2], group.word[3]});
            if (row.dtype == DTYPE_F32)
                st_global_v4(at + 16, u32x4{group.word[4], group.word[5], group.word[6], group.word[7]});
            return;
        }
#pragma unroll
        for (u32 i = 0; i < GROUP; i++) {
            if (column + i >= columns) continue;
            if (row.dtype == DTYPE_F32)
                st_global_u32(row.start + (u64)(column + i) * 4, group.word[i]);
            else
                st_global_u16(row.start + (u64)(column + i) * 2, group.word[i / 2] >> (16 * (i % 2)) & 0xffffu);
        }
    }

    QG_DEVICE void decode(const StoredGroup& group, u32 dtype, float (&value)[GROUP]) {
        if (dtype == DTYPE_F32) {
#pragma unroll
            for (u32 i = 0; i < GROUP; i++) value[i] = bits_to_f32(group.word[i]);
        } else if (dtype == DTYPE_F16) {
#pragma unroll
            for (u32 i = 0; i < GROUP; i++) value[i] = f16_to_f32(group.word[i / 2] >> (16 * (i % 2)) & 0xffffu);
        } else {
#pragma unroll
            for (u32 i = 0; i < GROUP; i++) value[i] = bf16_to_f32(group.word[i / 2] >> (16 * (i % 2)) & 0xffffu);
        }
    }

    // Rounds to nearest even.
    QG_DEVICE StoredGroup encode(const float (&value)[GROUP], u32 dtype) {
        StoredGroup group = {};
        if (dtype == DTYPE_F32) {
#pragma unroll
            for (u32 i = 0; i < GROUP; i++) group.word[i] = f32_to_bits(value[i]);
        } else if (dtype == DTYPE_F16) {
#pragma unroll
            for (u32 i = 0; i < GROUP; i++) group.word[i / 2] |= f32_to_f16(value[i]) << (16 * (i % 2));
        } else {
#pragma unroll
            for (u32 i = 0; i < GROUP; i++) group.word[i / 2] |= f32_to_bf16(value[i]) << (16 * (i % 2));
        }
        return group;
    }
};

// Adds the residual and stores the sum.
// `value` receives the rounded sum.
QG_DEVICE void add_residual(const StoredGroup& residual, u32 residual_dtype, const OperandRow& sum, u32 column,
                            u32 columns, float (&value)[GROUP]) {
    float other[GROUP];
    StoredGroup::decode(residual, residual_dtype, other);
#pragma unroll
    for (u32 i = 0; i < GROUP; i++) value[i] += other[i];
    const StoredGroup rounded = StoredGroup::encode(value, sum.dtype);
    StoredGroup::store(rounded, sum, column, columns);
    StoredGroup::decode(rounded, sum.dtype, value);
}

// Partial sums of warps. Separate lines
// save a barrier between consecutive sums.
struct NormStorage {
    u32 mean[2][32];
    u32 moments[2][2][32];
    u32 largest[32];
};
static_assert(sizeof(NormStorage) == QG_SHARED_BYTES, "the host computes another size");

// Deterministic sum over the threads of a row; all threads receive
// it. If rows share a warp, `row_threads` is a power of two.
template <u32 COUNT>
QG_DEVICE void row_sum(u32 row_threads, float (&value)[COUNT], u32* const (&line)[COUNT]) {
    const u32 in_warp = row_threads < 32 ? row_threads : 32;
    for (u32 mask = in_warp / 2; mask > 0; mask /= 2) {
#pragma unroll
        for (u32 i = 0; i < COUNT; i++) value[i] += shfl_xor(value[i], mask);
    }
    if (row_threads <= 32) return;
    const u32 lane = thread_index() % 32, warp = thread_index() / 32, warps = row_threads / 32;
#pragma unroll
    for (u32 i = 0; i < COUNT; i++) {
        if (lane == 0) st_shared(&line[i][warp], f32_to_bits(value[i]));
        // Zero the rest of the line: sums are read four at a time.
        if (warp == 0 && lane >= warps) st_shared(&line[i][lane], 0u);
    }
    cta_barrier();
    // A broadcast read by all threads is faster than shuffles.
#pragma unroll
    for (u32 i = 0; i < COUNT; i++) {
        value[i] = 0.0f;
        for (u32 w = 0; w < warps; w += 4) {
            const u32x4 four = ld_shared(reinterpret_cast<const u32x4*>(&line[i][w]));
            value[i] += (bits_to_f32(four.x) + bits_to_f32(four.y)) + (bits_to_f32(four.z) + bits_to_f32(four.w));
        }
    }
}

QG_DEVICE u32 row_max(u32 row_threads, u32 value, u32* line) {
    const auto larger = [](u32 a, u32 b) { return a > b ? a : b; };
    const u32 in_warp = row_threads < 32 ? row_threads : 32;
    for (u32 mask = in_warp / 2; mask > 0; mask /= 2) value = larger(value, shfl_xor_u32(value, mask));
    if (row_threads <= 32) return value;
    const u32 lane = thread_index() % 32;
    if (lane == 0) st_shared(&line[thread_index() / 32], value);
    cta_barrier();
    value = lane < row_threads / 32 ? ld_shared(&line[lane]) : 0;
#pragma unroll
    for (u32 mask = 16; mask > 0; mask /= 2) value = larger(value, shfl_xor_u32(value, mask));
    return value;
}

// Sums of squares in this range neither overflow nor lose precision to
// underflow. An eps above the lower bound makes that bound irrelevant.
constexpr float MOST_SQUARES = 0x1p120f, LEAST_SQUARES = 0x1p-60f;

// Row statistics: scale, mean and inverse deviation.
struct Statistics {
    // A power of two; 1 unless squares would leave f32's range.
    float scale;
    // Mean of the scaled values, and the mean of the
    // remaining differences, which corrects the rounding
    // error of `mean`. Both are 0 without FLAG_CENTERED.
    float mean, correction;
    float inverse;

    QG_DEVICE float normalized(const Statistics& s, float value) {
        return (value * s.scale - s.mean - s.correction) * s.inverse;
    }

    // `Row::each` visits groups of values
    // with the number of valid columns.
    template <class Row>
    QG_DEVICE Statistics of(const NormParams& p, const Row& row, NormStorage& storage) {
        Statistics s = {1.0f, 0.0f, 0.0f, 0.0f};
        float squares = moments(p, row, storage, 0, s);
        const bool is_small = squares < LEAST_SQUARES && p.shape.eps < LEAST_SQUARES;
        // Uniform for a row but not for a warp with
        // several rows; all its lanes must take part.
        bool rescales = !(squares <= MOST_SQUARES) || is_small;
        if (p.shape.row_threads < 32) rescales = ballot(rescales) != 0;
        return rescales ? rescaled(p, row, storage) : s;
    }

    // Statistics with rescaling, for squares outside f32's range.
    template <class Row>
    QG_DEVICE Statistics rescaled(const NormParams& p, const Row& row, NormStorage& storage) {
        Statistics s = {1.0f, 0.0f, 0.0f, 0.0f};
        u32 largest = f32_to_bits(sqrt_f32(p.shape.eps));
        Row::each(row, [&](const float(&value)[GROUP], u32 count) {
#pragma unroll
            for (u32 i = 0; i < GROUP; i++) {
                const u32 magnitude = f32_to_bits(value[i]) & 0x7fffffffu;
                // Infinities and NaN are unaffected by any factor.
                if (i < count && magnitude < 0x7f800000u && magnitude > largest) largest = magnitude;
            }
        });
        largest = row_max(p.shape.row_threads, largest, storage.largest);
        // Scaled values are below 4; the factor
        // and its inverse are normal numbers.
        u32 exponent = largest >> 23;
        exponent = exponent < 1 ? 1 : exponent > 253 ? 253 : exponent;
        s.scale = bits_to_f32((254 - exponent) << 23);
        moments(p, row, storage, 1, s);
        return s;
    }

    // Computes mean, correction and inverse of the values
    // times `s.scale`. Returns the sum of squares.
    template <class Row>
    QG_DEVICE float moments(const NormParams& p, const Row& row, NormStorage& storage, u32 turn, Statistics& s) {
        const float share = 1.0f / (float)p.shape.columns;
        const float eps = p.shape.eps * s.scale * s.scale;
        s.mean = s.correction = 0.0f;
        if (!(p.shape.flags & QG_FLAG_CENTERED)) {
            float squares[1] = {};
            Row::each(row, [&](const float(&value)[GROUP], u32 count) {
#pragma unroll
                for (u32 i = 0; i < GROUP; i++) {
                    const float scaled = value[i] * s.scale;
                    if (i < count) squares[0] += scaled * scaled;
                }
            });
            row_sum<1>(p.shape.row_threads, squares, {storage.moments[turn][1]});
            s.inverse = 1.0f / sqrt_f32(squares[0] * share + eps);
            return squares[0];
        }
        float sum[1] = {};
        Row::each(row, [&](const float(&value)[GROUP], u32 count) {
#pragma unroll
            for (u32 i = 0; i < GROUP; i++)
                if (i < count) sum[0] += value[i] * s.scale;
        });
        row_sum<1>(p.shape.row_threads, sum, {storage.mean[turn]});
        // No FMA contraction here: the compiler could fuse this
        // product into a difference elsewhere, which would then
        // use a different mean than `correction` assumes.
        s.mean = mul_rn_f32(sum[0], share);
        // Differences from the mean: their (small) sum and squares.
        float sums[2] = {};
        Row::each(row, [&](const float(&value)[GROUP], u32 count) {
#pragma unroll
            for (u32 i = 0; i < GROUP; i++) {
                if (i >= count) continue;
                const float beside = value[i] * s.scale - s.mean;
                sums[0] += beside;
                sums[1] += beside * beside;
            }
        });
        row_sum<2>(p.shape.row_threads, sums, {storage.moments[turn][0], storage.moments[turn][1]});
        s.correction = mul_rn_f32(sums[0], share);
        float variance = sums[1] * share - s.correction * s.correction;
        if (variance < 0.0f) variance = 0.0f;
        s.inverse = 1.0f / sqrt_f32(variance + eps);
        return sums[1];
    }
};

// Gamma and beta of a column group; zeros if absent.
struct ColumnGroup {
    StoredGroup gamma, beta;

    QG_DEVICE ColumnGroup load(const NormParams& p, u32 column) {
        ColumnGroup group = {};
        if (p.shape.flags & QG_FLAG_GAMMA) group.gamma = StoredGroup::load(OperandRow::gamma(p), column, p.shape.columns);
        if (p.shape.flags & QG_FLAG_BETA) group.beta = StoredGroup::load(OperandRow::beta(p), column, p.shape.columns);
        return group;
    }

    // Prefetches a group without holding registers.
    QG_DEVICE void prefetch(const NormParams& p, u32 column) {
        if (column + GROUP > p.shape.columns) return;
        const OperandRow gamma = OperandRow::gamma(p), beta = OperandRow::beta(p);
        if ((p.shape.flags & QG_FLAG_GAMMA) && gamma.aligned)
            ld_global_u32(gamma.start + (u64)column * bytes_of(gamma.dtype));
        if ((p.shape.flags & QG_FLAG_BETA) && beta.aligned)
            ld_global_u32(beta.start + (u64)column * bytes_of(beta.dtype));
    }
};

// Multiplies by gamma and adds beta.
QG_DEVICE void apply_columns(const NormParams& p, const ColumnGroup& of_columns, float (&out)[GROUP]) {
    float factor[GROUP];
    if (p.shape.flags & QG_FLAG_GAMMA) {
        StoredGroup::decode(of_columns.gamma, type_of(p, TYPE_GAMMA), factor);
#pragma unroll
        for (u32 i = 0; i < GROUP; i++) out[i] *= factor[i];
    }
    if (p.shape.flags & QG_FLAG_BETA) {
        StoredGroup::decode(of_columns.beta, type_of(p, TYPE_BETA), factor);
#pragma unroll
        for (u32 i = 0; i < GROUP; i++) out[i] += factor[i];
    }
}

// Normalizes a group. Columns beyond those of X become zero.
QG_DEVICE void normalize_group(const NormParams& p, const Statistics& s, const float (&value)[GROUP],
                               const ColumnGroup& of_columns, u32 column, float (&out)[GROUP]) {
    if (p.shape.flags & QG_FLAG_CENTERED) {
#pragma unroll
        for (u32 i = 0; i < GROUP; i++) out[i] = Statistics::normalized(s, value[i]);
    } else {
        // Mean and correction are 0.
#pragma unroll
        for (u32 i = 0; i < GROUP; i++) out[i] = value[i] * s.scale * s.inverse;
    }
    apply_columns(p, of_columns, out);
    if (column + GROUP <= p.shape.columns) return;
#pragma unroll
    for (u32 i = 0; i < GROUP; i++)
        if (column + i >= p.shape.columns) out[i] = 0.0f;
}

// Stores a normalized group to D.
QG_DEVICE void store_normalized(const NormParams& p, const Statistics& s, const float (&value)[GROUP],
                                const ColumnGroup& of_columns, u32 row, u32 column) {
    float out[GROUP];
    normalize_group(p, s, value, of_columns, column, out);
    const OperandRow d = OperandRow::d(p, row);
    StoredGroup::store(StoredGroup::encode(out, d.dtype), d, column, p.shape.d_columns);
}

// Stores D in permuted column order; reloads X by element.
QG_DEVICE void store_gathered(const NormParams& p, const Statistics& s, u32 row, u32 first_group, u32 group_step) {
    const OperandRow x = OperandRow::x(p, row), d = OperandRow::d(p, row);
    const OperandRow gamma = OperandRow::gamma(p), beta = OperandRow::beta(p);
    const u8* order = reinterpret_cast<const u8*>(p.at.order);
    for (u32 column = first_group * GROUP; column < p.shape.d_columns; column += group_step * GROUP) {
        float out[GROUP];
#pragma unroll
        for (u32 i = 0; i < GROUP; i++) {
            out[i] = 0.0f;
            if (column + i >= p.shape.d_columns) continue;
            const u32 source = ld_global_u32(order + (u64)(column + i) * 4);
            if (source >= p.shape.columns) continue;
            out[i] = Statistics::normalized(s, OperandRow::element(x, source));
            if (p.shape.flags & QG_FLAG_GAMMA) out[i] *= OperandRow::element(gamma, source);
            if (p.shape.flags & QG_FLAG_BETA) out[i] += OperandRow::element(beta, source);
        }
        StoredGroup::store(StoredGroup::encode(out, d.dtype), d, column, p.shape.d_columns);
    }
}
