// RMSNorm fused into the GEMM.
// Each CTA computes the statistics of whole rows while its
// first weights are loaded.
// Operands equal the output of a separate norm:
// rounded once to the type of X.
// Rows of X are 16-byte aligned with whole column groups; the
// host checks this.
#pragma once
#include "atoms/float.cuh"
#include "atoms/memory.cuh"
#include "atoms/numeric.cuh"
#include "atoms/sync.cuh"
#include "atoms/warp.cuh"
#include "mainloop/column_group.cuh"
#include "sched/projection.cuh"

// A sum of squares in this range suffers no over- or
// underflow, as in `mainloop/norm.cuh`.
constexpr float MOST_ROW_SQUARES = 0x1p120f, LEAST_ROW_SQUARES = 0x1p-60f;

// Row statistics, and scratch for exchange between warps.
struct RowStatistics {
    // scale: a power of two, 1 unless squares leave f32's range.
    // inverse: the factor of scaled values.
    float scale[QG_X_ROWS], inverse[QG_X_ROWS];
    u32 of_warp[QG_THREADS / 32][QG_X_ROWS];
    // Whether the token must be rescaled.
    u32 rescales[QG_X_ROWS];
};

QG_DEVICE float x_to_f32(u32 bits) {
    return QG_X_DTYPE == DTYPE_F16 ? f16_to_f32(bits) : bf16_to_f32(bits);
}
QG_DEVICE u32 f32_to_x(float value) {
    return QG_X_DTYPE == DTYPE_F16 ? f32_to_f16(value) : f32_to_bf16(value);
}

// Calls `visit` for every column group of each token that
// this thread reads.
template <class Visit>
QG_DEVICE void each_group_of_rows(const GemmParams& p, u32 first_token, u32 thread, Visit visit) {
    constexpr u32 WORDS = QG_X_DTYPE == DTYPE_F32 || QG_RESIDENT_X ? 8 : 4;
    const bool wide = QG_X_DTYPE == DTYPE_F32 || normalizes_f32(p);
    const u32 tokens = p.shape.m - first_token, bytes = wide ? 4 : 2;
    const u8* rows = reinterpret_cast<const u8*>(p.at.x) + (u64)first_token * p.at.x_row * bytes;
#pragma unroll 1
    for (u32 column = thread * GROUP; column < p.shape.k; column += QG_THREADS * GROUP) {
#pragma unroll
        for (u32 t = 0; t < QG_X_ROWS; t++) {
            if (t >= tokens) continue;
            const u8* at = rows + (t * p.at.x_row + column) * bytes;
            u32 word[WORDS];
#pragma unroll
            for (u32 i = 0; i < WORDS; i += 4) {
                if (i > 0 && !wide) continue;
                const u32x4 four = ld_global_v4(at + i * 4);
                word[i] = four.x, word[i + 1] = four.y, word[i + 2] = four.z, word[i + 3] = four.w;
            }
            float value[GROUP];
#pragma unroll
            for (u32 i = 0; i < GROUP; i++)
                value[i] = wide ? bits_to_f32(word[i % WORDS]) : x_to_f32(word[i / 2] >> (16 * (i % 2)) & 0xffffu);
            visit(t, value);
        }
    }
}

// Statistics of the tokens from `first_token` on.
// The whole CTA calls it; then all threads may read them.
struct RowNormalizer {
    QG_DEVICE void find(RowStatistics& rows, const GemmParams& p, u32 first_token, u32 thread) {
        float squares[QG_X_ROWS] = {};
        each_group_of_rows(p, first_token, thread, [&](u32 token, const float(&value)[GROUP]) { add(squares[token], value, 1.0f); });
        find(rows, squares, p, first_token, thread);
    }

    // `find` with each thread's partial sums of squares.
    QG_DEVICE void find(RowStatistics& rows, float (&squares)[QG_X_ROWS], const GemmParams& p, u32 first_token, u32 thread) {
        if (thread < QG_X_ROWS) st_shared(&rows.scale[thread], 1.0f);
        add_up(rows, squares, p, first_token, thread, true);
        u32 rescales = 0;
#pragma unroll
        for (u32 t = 0; t < QG_X_ROWS; t++) rescales |= ld_shared(&rows.rescales[t]);
        if (rescales == 0) return;
        find_scales(rows, p, first_token, thread);
        float scaled[QG_X_ROWS] = {};
        each_group_of_rows(p, first_token, thread, [&](u32 token, const float(&value)[GROUP]) {
            add(scaled[token], value, ld_shared(&rows.scale[token]));
        });
        add_up(rows, scaled, p, first_token, thread, false);
    }

    QG_DEVICE void add(float& squares, const float (&value)[GROUP], float scale) {
#pragma unroll
        for (u32 i = 0; i < GROUP; i++) {
            const float scaled = value[i] * scale;
            squares += scaled * scaled;
        }
    }

    // Computes the inverses of the scaled rows and, if `may`,
    // whether rows must be rescaled.
    QG_DEVICE void add_up(RowStatistics& rows, float (&squares)[QG_X_ROWS], const GemmParams& p, u32 first_token, u32 thread, bool may) {
        const u32 tokens = p.shape.m - first_token;
#pragma unroll
        for (u32 t = 0; t < QG_X_ROWS; t++) {
            if (t < tokens) {
#pragma unroll
                for (u32 mask = 16; mask > 0; mask /= 2) squares[t] += shfl_xor(squares[t], mask);
            }
            if (thread % 32 == 0) st_shared(&rows.of_warp[thread / 32][t], f32_to_bits(squares[t]));
        }
        cta_barrier();
        if (thread < QG_X_ROWS) {
            float sum = 0.0f;
#pragma unroll
            for (u32 warp = 0; warp < QG_THREADS / 32; warp++) sum += bits_to_f32(ld_shared(&rows.of_warp[warp][thread]));
            const float scale = ld_shared(&rows.scale[thread]), eps = p.projection.eps;
            st_shared(&rows.inverse[thread], 1.0f / sqrt_f32(sum * (1.0f / (float)p.shape.k) + eps * scale * scale));
            const bool is_small = sum < LEAST_ROW_SQUARES && eps < LEAST_ROW_SQUARES;
            const bool rescales = may && first_token + thread < p.shape.m && (!(sum <= MOST_ROW_SQUARES) || is_small);
            st_shared(&rows.rescales[thread], (u32)rescales);
        }
        cta_barrier();
    }

    // Powers of two that bring the largest values below 4.
    QG_DEVICE void find_scales(RowStatistics& rows, const GemmParams& p, u32 first_token, u32 thread) {
        u32 largest[QG_X_ROWS] = {};
        const auto keep = [](u32& most, u32 value) {
            if (value > most) most = value;
        };
        each_group_of_rows(p, first_token, thread, [&](u32 token, const float(&value)[GROUP]) {
#pragma unroll
            for (u32 i = 0; i < GROUP; i++) {
                const u32 magnitude = f32_to_bits(value[i]) & 0x7fffffffu;
                // Infinity and NaN are the same under every factor.
                if (magnitude < 0x7f800000u) keep(largest[token], magnitude);
            }
        });
#pragma unroll
        for (u32 t = 0; t < QG_X_ROWS; t++) {
#pragma unroll
            for (u32 mask = 16; mask > 0; mask /= 2) keep(largest[t], shfl_xor_u32(largest[t], mask));
            if (thread % 32 == 0) st_shared(&rows.of_warp[thread / 32][t], largest[t]);
        }
        cta_barrier();
        if (thread < QG_X_ROWS) {
            u32 most = f32_to_bits(sqrt_f32(p.projection.eps));
            for (u32 warp = 0; warp < QG_THREADS / 32; warp++) keep(most, ld_shared(&rows.of_warp[warp][thread]));
            // The factor and its inverse are normal numbers.
            u32 exponent = most >> 23;
            exponent = exponent < 1 ? 1 : exponent > 253 ? 253 : exponent;
            st_shared(&rows.scale[thread], bits_to_f32((254 - exponent) << 23));
        }
        cta_barrier();
    }

    QG_DEVICE float gamma(const GemmParams& p, u32 column) {
        const ProjectionOperands& of = p.projection;
        const u8* at = reinterpret_cast<const u8*>(of.gamma);
        if (of.gamma == 0 || column >= p.shape.k) return 1.0f;
        const u32 dtype = of.types & 15u;
        if (dtype == DTYPE_F32) return bits_to_f32(ld_global_u32(at + (u64)column * 4));
        const u32 bits = ld_global_cached_u16(at + (u64)column * 2);
        return dtype == DTYPE_F16 ? f16_to_f32(bits) : bf16_to_f32(bits);
    }

    // Gamma of a column group; all or none of its columns are in X.
    QG_DEVICE void gamma_of_group(const GemmParams& p, u32 column, float (&value)[GROUP]) {
        const ProjectionOperands& of = p.projection;
        const u32 dtype = of.types & 15u, bytes = dtype == DTYPE_F32 ? 4 : 2;
        if (of.gamma == 0 || of.gamma % 16 != 0 || column >= p.shape.k) {
#pragma unroll 1
            for (u32 i = 0; i < GROUP; i++) {
                const float next = gamma(p, column + i);
                // Registers cannot be indexed.
#pragma unroll
                for (u32 j = 0; j + 1 < GROUP; j++) value[j] = value[j + 1];
                value[GROUP - 1] = next;
            }
            return;
        }
        const u8* at = reinterpret_cast<const u8*>(of.gamma) + (u64)column * bytes;
        const u32x4 low = ld_global_v4(at);
        if (dtype == DTYPE_F32) {
            const u32x4 high = ld_global_v4(at + 16);
            const u32 word[GROUP] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
            for (u32 i = 0; i < GROUP; i++) value[i] = bits_to_f32(word[i]);
            return;
        }
        const u32 word[GROUP / 2] = {low.x, low.y, low.z, low.w};
#pragma unroll
        for (u32 i = 0; i < GROUP; i++) {
            const u32 bits = word[i / 2] >> (16 * (i % 2)) & 0xffffu;
            value[i] = dtype == DTYPE_F16 ? f16_to_f32(bits) : bf16_to_f32(bits);
        }
    }

    QG_DEVICE float normalized(const RowStatistics& rows, u32 token, float value, float gamma) {
        return value * ld_shared(&rows.scale[token]) * ld_shared(&rows.inverse[token]) * gamma;
    }

    // Normalizes two neighbouring columns of a token.
    QG_DEVICE u32 normalized_pair(const RowStatistics& rows, u32 token, u32 pair, float gamma_low, float gamma_high) {
        return f32_to_x(normalized(rows, token, x_to_f32(pair & 0xffffu), gamma_low)) |
               f32_to_x(normalized(rows, token, x_to_f32(pair >> 16), gamma_high)) << 16;
    }
};
