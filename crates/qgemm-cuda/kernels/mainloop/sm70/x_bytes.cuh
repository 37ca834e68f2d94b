// X as signed bytes in shared memory, with block scales.
// A stage has 64 columns: 64 bytes a token, in W's byte order.
// 16-byte chunks are swizzled:
// chunk c of token r is at c ^ (r/2%4).
// Eight lanes then reach all banks in both accesses:
// stores of two tokens, and loads of one chunk of eight tokens.
#pragma once
#include "atoms/memory.cuh"
#include "mainloop/signed_byte_sums.cuh"

using XSource = SignedByteParams;
// Scale and minimum of a row in a sub-block.
using RowTerms = SignedBytes;

// Columns between main-loop barriers.
constexpr u32 STAGE_K = 64;
constexpr u32 STAGE_K_BLOCKS = STAGE_K / K_BLOCK;
// Sub-blocks per stage; 1 for a longer sub-block.
constexpr u32 STAGE_SUBS = QG_SUB_BLOCK < STAGE_K ? STAGE_K / QG_SUB_BLOCK : 1;

// 16-byte chunks and scales of a token per stage.
constexpr u32 STAGE_CHUNKS = STAGE_K / X_CHUNK, X_SCALES = QG_X_BLOCK_SCALES ? STAGE_K / X_SCALE_COLUMNS : 0;

// Sub-block of the stage for sum `sum` of k-block `k_block`.
QG_DEVICE u32 sub_block_of_sum(u32 k_block, u32 sum) {
    return (k_block * K_BLOCK + sum * SUM_K) * STAGE_SUBS / STAGE_K;
}

struct XRows {
    alignas(16) u8 codes[QG_TILE_M * STAGE_K];  // [token][column], swizzled
    alignas(16) float scale[X_SCALES > 0 ? QG_TILE_M * X_SCALES : 4];  // [token][32 columns]
    // Sums of the codes of each chunk, for minimums.
    alignas(16) float sum[RowTerms::HAS_MIN ? QG_TILE_M * STAGE_CHUNKS : 4];  // [token][chunk]

    QG_DEVICE u32 place(u32 token, u32 chunk) { return token * STAGE_K + (chunk ^ token / 2 % 4) * X_CHUNK; }

    // Scale of `token` at column `column` of the stage; 1 if none.
    QG_DEVICE float scale_of(const XRows& x, u32 token, u32 column) {
        return X_SCALES > 0 ? ld_shared(&x.scale[token * X_SCALES + column / X_SCALE_COLUMNS]) : 1.0f;
    }
    // Exact sum of codes over SUM_K columns from `column`.
    QG_DEVICE float sum_of(const XRows& x, u32 token, u32 column) {
        float sum = 0;
#pragma unroll
        for (u32 i = 0; i < SUM_K / X_CHUNK; i++) sum += ld_shared(&x.sum[token * STAGE_CHUNKS + column / X_CHUNK + i]);
        return sum;
    }
};

// A thread's share of X: 16 columns of some tokens, and the
// scale of 32 columns of one token.
struct XStream {
    // Tokens per pass of the CTA, and passes per stage.
    static constexpr u32 TOKENS = QG_THREADS / STAGE_CHUNKS, SCALED_TOKENS = QG_THREADS / 2;
    static constexpr u32 TIMES = (QG_TILE_M + TOKENS - 1) / TOKENS;
    static_assert(QG_TILE_M <= SCALED_TOKENS, "a thread has one scale");
    u32x4 chunk[TIMES];
    float scale;
    // Address of the first token's next columns.
    const u8* next;

    QG_DEVICE void begin(XStream& x, const XSource& from, u32 first_token, u32 stage, u32 thread) {
        const u64 token = first_token + thread / STAGE_CHUNKS;
        x.next = reinterpret_cast<const u8*>(from.gemm.at.x) + token * from.gemm.at.x_row + stage * STAGE_K +
                 thread % STAGE_CHUNKS * X_CHUNK;
    }

    // Loads the columns from 64 · `stage`, zero outside X.
    // Calls must be in stage order.
    QG_DEVICE void load(XStream& x, const XSource& from, u32 first_token, u32 stage, u32 thread) {
        const GemmParams& p = from.gemm;
        const bool inside = stage * STAGE_K + thread % STAGE_CHUNKS * X_CHUNK < p.shape.k;
#pragma unroll
        for (u32 i = 0; i < TIMES; i++) {
            const u32 token = thread / STAGE_CHUNKS + i * TOKENS;
            x.chunk[i] = {};
            if (inside && token < QG_TILE_M && first_token + token < p.shape.m)
                x.chunk[i] = ld_global_v4(x.next + i * TOKENS * p.at.x_row);
        }
        x.next += STAGE_K;
        if constexpr (X_SCALES > 0) {
            const u32 token = thread / 2, column = stage * STAGE_K + thread % 2 * X_SCALE_COLUMNS;
            x.scale = 0;
            if (token < QG_TILE_M && column < p.shape.k && first_token + token < p.shape.m)
                x.scale = bits_to_f32(ld_global_u32(reinterpret_cast<const u8*>(from.x.scales) +
                                                    (u64)(column >> from.x.block_shift) * 4 +
                                                    (first_token + token) * from.x.scales_row));
        }
    }

    QG_DEVICE void store(XRows& rows, const XStream& x, u32 thread) {
#pragma unroll
        for (u32 i = 0; i < TIMES; i++) {
            const u32 token = thread / STAGE_CHUNKS + i * TOKENS;
            if (QG_TILE_M % TOKENS != 0 && token >= QG_TILE_M) continue;
            const u32x4 v = x.chunk[i];
            if constexpr (RowTerms::HAS_MIN)
                st_shared(&rows.sum[token * STAGE_CHUNKS + thread % STAGE_CHUNKS], (float)sum_of_codes(v));
            st_shared(reinterpret_cast<u32x4*>(rows.codes + XRows::place(token, thread % STAGE_CHUNKS)), in_order_of_w(v));
        }
        if constexpr (X_SCALES > 0)
            if (thread / 2 < QG_TILE_M) st_shared(&rows.scale[thread], x.scale);
    }
};
