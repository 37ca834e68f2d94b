// RMSNorm of a CTA's tokens inside their product. Each CTA finds the statistics of whole rows while its first weights come from memory, and
// normalizes each group of columns in shared memory, rounded once to the type of X: what is multiplied is what the launch of a norm would
// have written. Rows of X begin at multiples of 16 bytes, and have whole groups of columns (the host offers such kernels for no others).
#pragma once
#include "atoms/float.cuh"
#include "atoms/memory.cuh"
#include "atoms/numeric.cuh"
#include "atoms/sync.cuh"
#include "atoms/warp.cuh"
#include "mainloop/column_group.cuh"
#include "sched/projection.cuh"

// Squares whose sum lies between these lose nothing to the ends of f32's range, as in `mainloop/norm.cuh`.
constexpr float MOST_ROW_SQUARES = 0x1p120f, LEAST_ROW_SQUARES = 0x1p-60f;

// The statistics of a CTA's tokens, and what its warps tell one another of them.
struct RowStatistics {
    // A power of two, 1 unless squares would leave f32's range, and the factor of values times it.
    float scale[QG_TILE_M], inverse[QG_TILE_M];
    u32 of_warp[QG_THREADS / 32][QG_TILE_M];
    // Whether a token is to be scaled.
    u32 rescales[QG_TILE_M];
};

QG_DEVICE float x_to_f32(u32 bits) {
    return QG_X_DTYPE == DTYPE_F16 ? f16_to_f32(bits) : bf16_to_f32(bits);
}
QG_DEVICE u32 f32_to_x(float value) {
    return QG_X_DTYPE == DTYPE_F16 ? f32_to_f16(value) : f32_to_bf16(value);
}

// Gives `visit` every group of columns of each token that this thread reads.
template <class Visit>
QG_DEVICE void each_group_of_rows(const GemmParams& p, u32 first_token, u32 thread, Visit visit) {
    constexpr u32 WORDS = QG_X_DTYPE == DTYPE_F32 ? 8 : 4;
    const u32 tokens = p.shape.m - first_token;
    const u8* rows = reinterpret_cast<const u8*>(p.at.x) + (u64)first_token * p.at.x_row * (WORDS / 2);
#pragma unroll 1
    for (u32 column = thread * GROUP; column < p.shape.k; column += QG_THREADS * GROUP) {
#pragma unroll
        for (u32 t = 0; t < QG_TILE_M; t++) {
            if (t >= tokens) continue;
            const u8* at = rows + (t * p.at.x_row + column) * (WORDS / 2);
            u32 word[WORDS];
#pragma unroll
            for (u32 i = 0; i < WORDS; i += 4) {
                const u32x4 four = ld_global_v4(at + i * 4);
                word[i] = four.x, word[i + 1] = four.y, word[i + 2] = four.z, word[i + 3] = four.w;
            }
            float value[GROUP];
#pragma unroll
            for (u32 i = 0; i < GROUP; i++)
                value[i] = WORDS == 8 ? bits_to_f32(word[i % WORDS]) : x_to_f32(word[i / 2] >> (16 * (i % 2)) & 0xffffu);
            visit(t, value);
        }
    }
}

// Finds the statistics of the tokens from `first_token` on. For the whole CTA; all threads may read them afterwards.
struct RowNormalizer {
    QG_DEVICE void find(RowStatistics& rows, const GemmParams& p, u32 first_token, u32 thread) {
        if (thread < QG_TILE_M) st_shared(&rows.scale[thread], 1.0f);
        cta_barrier();
        add_squares(rows, p, first_token, thread, true);
        u32 rescales = 0;
#pragma unroll
        for (u32 t = 0; t < QG_TILE_M; t++) rescales |= ld_shared(&rows.rescales[t]);
        if (rescales == 0) return;
        find_scales(rows, p, first_token, thread);
        add_squares(rows, p, first_token, thread, false);
    }

    // Finds the inverses of the rows as they are scaled, and whether they are to be scaled otherwise, where that `may` be.
    QG_DEVICE void add_squares(RowStatistics& rows, const GemmParams& p, u32 first_token, u32 thread, bool may) {
        float squares[QG_TILE_M] = {};
        each_group_of_rows(p, first_token, thread, [&](u32 token, const float(&value)[GROUP]) {
            const float scale = may ? 1.0f : ld_shared(&rows.scale[token]);
#pragma unroll
            for (u32 i = 0; i < GROUP; i++) {
                const float scaled = value[i] * scale;
                squares[token] += scaled * scaled;
            }
        });
#pragma unroll
        for (u32 t = 0; t < QG_TILE_M; t++) {
#pragma unroll
            for (u32 mask = 16; mask > 0; mask /= 2) squares[t] += shfl_xor(squares[t], mask);
            if (thread % 32 == 0) st_shared(&rows.of_warp[thread / 32][t], f32_to_bits(squares[t]));
        }
        cta_barrier();
        if (thread < QG_TILE_M) {
            float sum = 0.0f;
            for (u32 warp = 0; warp < QG_THREADS / 32; warp++) sum += bits_to_f32(ld_shared(&rows.of_warp[warp][thread]));
            const float scale = ld_shared(&rows.scale[thread]), eps = p.projection.eps;
            st_shared(&rows.inverse[thread], 1.0f / sqrt_f32(sum * (1.0f / (float)p.shape.k) + eps * scale * scale));
            const bool is_small = sum < LEAST_ROW_SQUARES && eps < LEAST_ROW_SQUARES;
            const bool rescales = may && first_token + thread < p.shape.m && (!(sum <= MOST_ROW_SQUARES) || is_small);
            st_shared(&rows.rescales[thread], (u32)rescales);
        }
        cta_barrier();
    }

    // Finds the powers of two with which the largest values are below 4.
    QG_DEVICE void find_scales(RowStatistics& rows, const GemmParams& p, u32 first_token, u32 thread) {
        u32 largest[QG_TILE_M] = {};
        const auto keep = [](u32& most, u32 value) {
            if (value > most) most = value;
        };
        each_group_of_rows(p, first_token, thread, [&](u32 token, const float(&value)[GROUP]) {
#pragma unroll
            for (u32 i = 0; i < GROUP; i++) {
                const u32 magnitude = f32_to_bits(value[i]) & 0x7fffffffu;
                // Infinity and NaN stay what they are under every factor.
                if (magnitude < 0x7f800000u) keep(largest[token], magnitude);
            }
        });
#pragma unroll
        for (u32 t = 0; t < QG_TILE_M; t++) {
#pragma unroll
            for (u32 mask = 16; mask > 0; mask /= 2) keep(largest[t], shfl_xor_u32(largest[t], mask));
            if (thread % 32 == 0) st_shared(&rows.of_warp[thread / 32][t], largest[t]);
        }
        cta_barrier();
        if (thread < QG_TILE_M) {
            u32 most = f32_to_bits(sqrt_f32(p.projection.eps));
            for (u32 warp = 0; warp < QG_THREADS / 32; warp++) keep(most, ld_shared(&rows.of_warp[warp][thread]));
            // Factor and its inverse are normal numbers.
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

    QG_DEVICE float normalized(const RowStatistics& rows, u32 token, float value, float gamma) {
        return value * ld_shared(&rows.scale[token]) * ld_shared(&rows.inverse[token]) * gamma;
    }

    // Normalizes two neighbouring columns of a token.
    QG_DEVICE u32 normalized_pair(const RowStatistics& rows, u32 token, u32 pair, float gamma_low, float gamma_high) {
        return f32_to_x(normalized(rows, token, x_to_f32(pair & 0xffffu), gamma_low)) |
               f32_to_x(normalized(rows, token, x_to_f32(pair >> 16), gamma_high)) << 16;
    }
};
